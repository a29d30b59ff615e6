// Mouse, touch and keys.
const pointers = new Map();
let dragged = 0;
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  dragged = 0;
  state.engaged = true;
});
canvas.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  const left = canvas.getBoundingClientRect().left;
  if (before) {
    const dx = event.clientX - before.x, dy = event.clientY - before.y;
    dragged += Math.abs(dx) + Math.abs(dy);
    if (pointers.size === 2) {
      const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
      const was = Math.max(Math.abs(before.x - other.x), 12), now = Math.max(Math.abs(event.clientX - other.x), 12);
      zoom(was / now, (event.clientX + other.x) / 2 - left);
    } else if (dragged > 3) {
      canvas.classList.add("dragging");
      pan(-dx / (width - labels - 8));
      if (event.pointerType === "mouse") view.scrollTop -= dy;
    }
    pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    tip.hidden = true;
    return;
  }
  const found = hit(event);
  state.cursor = found ? found.time : null;
  showTip(found && (found.item !== NOTHING ? describe(found.item) : describeGap(lanes[found.lane], found.time)), event.clientX, event.clientY);
  redraw();
});
function release(event) {
  if (!pointers.delete(event.pointerId)) return;
  canvas.classList.remove("dragging");
  if (dragged > 3 || event.type !== "pointerup") return;
  const found = hit(event);
  if (!found || found.item === NOTHING) { follow(NOTHING); focusOn(NOTHING); return; }
  focusOn(found.item, found.lane, false);
  showTip(describe(found.item), event.clientX, event.clientY);
  if (microbatch[found.item] >= 0) follow(state.follow === microbatch[found.item] ? NOTHING : microbatch[found.item]);
}
canvas.addEventListener("pointerup", release);
canvas.addEventListener("pointercancel", release);
canvas.addEventListener("pointerleave", () => { tip.hidden = true; state.cursor = null; state.engaged = false; redraw(); });
canvas.addEventListener("dblclick", () => show(0, total));
// The wheel scrolls the page as everywhere else; with Ctrl, or after a click, it zooms.
canvas.addEventListener("wheel", (event) => {
  const x = event.clientX - canvas.getBoundingClientRect().left;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    pan((event.deltaX || event.deltaY) / width);
  } else if (event.ctrlKey || event.metaKey || (state.engaged && (event.deltaY < 0 || !isWhole()))) {
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * (event.deltaMode ? 0.05 : 0.0016)))), x);
  }
  tip.hidden = true;
}, { passive: false });

function follow(m) {
  state.follow = m;
  byId("microbatch").value = m === NOTHING ? "" : m;
  redraw();
}
function setCritical(on) {
  state.critical = on;
  byId("critical").checked = on;
  redraw();
}
function focusOn(item, lane = item === NOTHING ? 0 : laneOf(item), reveal = true) {
  state.focus = item;
  if (item === NOTHING) { tip.hidden = true; redraw(); return; }
  if (lane < 0) { byId("transfers").checked = state.transfers = true; layOut(); lane = laneOf(item); }
  state.focusLane = lane;
  const lines = describe(item);
  byId("said").textContent = lines.join("; ");
  if (reveal) {
    const span = state.to - state.from;
    if (start[item] < state.from || end[item] > state.to) {
      const middle = (start[item] + end[item]) / 2;
      show(middle - span / 2, middle + span / 2);
    }
    const y = lanes[lane].y, room = height - HEAD;
    if (y < view.scrollTop) view.scrollTop = Math.max(y - 8, 0);
    else if (y + lanes[lane].height > view.scrollTop + room) view.scrollTop = y + lanes[lane].height - room + 8;
    const box = canvas.getBoundingClientRect();
    const x = Math.min(Math.max(xOf(end[item]), labels), width - 8);
    showTip(lines, box.left + x - 10, box.top + HEAD + y + lanes[lane].height - view.scrollTop - 10);
  }
  redraw();
}
function step(by) {
  if (summary) { pan(0.1 * by); return; }
  if (state.focus === NOTHING) { focusOn(lanes[0].first, 0); return; }
  const lane = lanes[state.focusLane], last = lane.first + lane.count - 1;
  const reduces = lane.reduces.filter((i) => end[i] > start[i]), at = reduces.indexOf(state.focus);
  let next = state.focus + by;
  if (at >= 0) next = at + by < 0 ? last : reduces[Math.min(at + by, reduces.length - 1)];
  else if (next > last) next = reduces.length ? reduces[0] : last;
  focusOn(Math.max(next, lane.first), state.focusLane);
}
function changeLane(by) {
  if (summary) { view.scrollTop += 40 * by; return; }
  if (state.focus === NOTHING) { focusOn(lanes[0].first, 0); return; }
  const next = Math.min(Math.max(state.focusLane + by, 0), lanes.length - 1), lane = lanes[next];
  const found = firstEndingAfter(start[state.focus], lane.first, lane.first + lane.count);
  focusOn(Math.min(found, lane.first + lane.count - 1), next);
}
const keys = {
  "+": () => zoom(0.7), "=": () => zoom(0.7), w: () => zoom(0.7), "-": () => zoom(1 / 0.7), s: () => zoom(1 / 0.7),
  a: () => pan(-0.15), d: () => pan(0.15), 0: () => show(0, total), Home: () => show(0, total),
  ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => changeLane(-1), ArrowDown: () => changeLane(1),
  PageDown: () => { view.scrollTop += height * 0.8; }, PageUp: () => { view.scrollTop -= height * 0.8; },
  b: () => { if (state.focus !== NOTHING && waits[state.focus] !== NOTHING) focusOn(waits[state.focus]); },
  c: () => setCritical(!state.critical),
  Enter: () => { if (state.focus !== NOTHING) follow(state.follow === microbatch[state.focus] ? NOTHING : microbatch[state.focus]); },
  Escape: () => { follow(NOTHING); focusOn(NOTHING); setCritical(false); state.engaged = false; },
};
canvas.addEventListener("keydown", (event) => {
  const action = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});
canvas.addEventListener("blur", () => { tip.hidden = true; });
byId("zoom-in").addEventListener("click", () => zoom(0.6));
byId("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
byId("fit").addEventListener("click", () => show(0, total));
byId("critical").addEventListener("change", (event) => setCritical(event.target.checked));
byId("transfers").addEventListener("change", (event) => { state.transfers = event.target.checked; focusOn(NOTHING); layOut(); });
byId("by-device").addEventListener("change", (event) => { state.byDevice = event.target.checked; focusOn(NOTHING); layOut(); });
byId("microbatch").addEventListener("input", (event) => {
  const m = event.target.value === "" ? NaN : Number(event.target.value);
  state.follow = Number.isInteger(m) && m >= 0 && m < M ? m : NOTHING;
  redraw();
});
view.addEventListener("scroll", redraw, { passive: true });
byId("memory-view").addEventListener("scroll", redraw, { passive: true });
memoryCanvas.addEventListener("pointermove", (event) => {
  const box = memoryCanvas.getBoundingClientRect(), x = event.clientX - box.left;
  const row = memoryRows[Math.floor((event.clientY - box.top + byId("memory-view").scrollTop) / ROW)];
  if (!row || x < labels) { showTip(null); return; }
  state.cursor = timeAt(x);
  const held = heldAt(row.stage, state.cursor);
  showTip([`${gb(row.base_gb + held * row.per_microbatch_gb)} on ${fitNames(row.names)}`,
    `${ms(state.cursor)}${data.groups ? "" : `, ${held} microbatch${held === 1 ? "" : "es"} in flight`}`], event.clientX, event.clientY);
  redraw();
});
const fitNames = (names) => (names.length > 3 ? `${names[0]} and ${names.length - 1} like it` : names.join(", "));
memoryCanvas.addEventListener("pointerleave", () => { tip.hidden = true; state.cursor = null; redraw(); });

