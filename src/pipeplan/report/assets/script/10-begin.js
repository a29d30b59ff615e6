// Begin, and what tests and the curious may ask for.
const restyle = () => { readColours(); resize(); };
function print(on) {
  if (state.printing === on) return;
  state.printing = on;
  for (const part of document.querySelectorAll("details:not(.keys, .other-plan)")) part.open = on || part.open;
  if (on) { state.from = 0; state.to = total || 1; state.cursor = null; tip.hidden = true; }
  restyle();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
matchMedia("print").addEventListener("change", (event) => print(event.matches));
window.addEventListener("beforeprint", () => print(true));
window.addEventListener("afterprint", () => print(false));
new ResizeObserver(() => { if (ownWidth() !== width) resize(); }).observe(view);
byId("by-device").checked = state.byDevice;
byId("by-device-label").hidden = numDevices === G || Boolean(summary);
for (const id of ["critical-label", "microbatch-label"]) byId(id).hidden = Boolean(summary);
byId("download-trace").hidden = !data.has_trace;
readColours();
layOut();
document.documentElement.dataset.ready = "true";
// For tests and for the curious: where an item is drawn, and what is shown.
window.pipeplan = {
  state, draw, describe, numberOfBlock: (letter, n, m) => numberOf[slot(0, letter === "F" ? 0 : 1, n, m)],
  pointOf: (i) => {
    const box = canvas.getBoundingClientRect(), lane = lanes[laneOf(i)];
    return { x: box.left + (xOf(start[i]) + xOf(end[i])) / 2, y: box.top + HEAD + lane.y + lane.height / 2 - view.scrollTop };
  },
};
