// What the pointer and the keys find, in words.
const WORDS = ["forward", "backward", "", "input gradient", "weight gradient"];
function describe(i) {
  const lines = [`${ms(start[i])} to ${ms(end[i])}, takes ${ms(end[i] - start[i])}`];
  if (isBlock(i)) {
    const devices = groups[groupOf[place[i]]].devices, count = devices.length;
    const names = devices.slice(0, 4).map((device) => shown(device.name));
    const many = count > 3 ? `${names.slice(0, 3).join(", ")} and ${count - 3} more` : names.join(", ");
    lines.push(`microbatch ${microbatch[i]} ${WORDS[kind[i]]}, ${many}`);
  } else if (isTransfer(i)) lines.push(`microbatch ${microbatch[i]}, ${kind[i] === FORWARD ? "activations" : "gradients"}`);
  if (summary) return [nameOf(i), ...lines];
  if (waits[i] === NOTHING) lines.push("waited for nothing");
  else {
    const busy = isBlock(i) && waits[i] === i - 1;
    const queued = isTransfer(i) && isTransfer(waits[i]);
    lines.push(`waited for ${nameOf(waits[i])}${busy ? " (its devices were busy)" : queued ? " (the link was busy)" : ""}`);
  }
  if (slowed.has(i)) lines.push(slowedBy(i));
  else if (slowed.has(waits[i])) lines.push(`which was ${slowedBy(waits[i])}`);
  return [nameOf(i), ...lines];
}
function slowedBy(i) {
  const found = slowed.get(i);
  return `slowed by ${ms(found.more)}: ${nameOf(found.by)} used ${shown(found.link)} too`;
}
// A moment of a summary: how busy the lane is in its bin.
function describeBin(lane, time) {
  const k = Math.min(Math.max(Math.floor(time / binMs), 0), bins - 1), from = k * binMs;
  const before = summaryUntil(from, lane.row), after = summaryUntil(from + binMs, lane.row);
  const busy = after[0] - before[0], back = busy > 0 ? (after[1] - before[1]) / busy : 0;
  const lines = [`${ms(from)} to ${ms(from + binMs)}`, `busy ${(100 * busy / binMs).toFixed(0)} % of it`];
  if (lane.thin) return [`${lane.direction === FORWARD ? "activations" : "gradients"} ${lane.label}`, ...lines];
  if (busy > 0) lines.push(`${(100 * back).toFixed(0)} % of that backward`);
  return [`${noun} ${lane.stage}`, ...lines];
}
function describeGap(lane, time) {
  if (summary) return describeBin(lane, time);
  const last = lane.first + lane.count, next = firstEndingAfter(time, lane.first, last);
  if (lane.thin) return null;
  if (time >= lane.done) {
    return [`${noun} ${lane.stage} idle`, `${ms(total - lane.done)} until the iteration ends`, `waits for ${nameOf(data.last)}`];
  }
  if (next >= last) return null;
  const from = next > lane.first ? end[next - 1] : 0;
  if (time < from) return null; // between a quick device's end and the slow one's
  return [`${noun} ${lane.stage} idle`, `${ms(from)} to ${ms(start[next])}, ${ms(start[next] - from)}`, `${longCode(next)} waits for ${nameOf(waits[next])}`];
}
function showTip(lines, x, y) {
  if (!lines) { tip.hidden = true; return; }
  tip.replaceChildren(...lines.map((line, k) => {
    const part = document.createElement(k ? "span" : "b");
    part.textContent = line;
    return part;
  }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > window.innerWidth ? x - box.width - 12 : x + 16;
  const below = y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, below) + "px";
}
function hit(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  if (x < labels || y < HEAD) return null;
  const lane = laneAt(y - HEAD + view.scrollTop);
  if (lane < 0) return null;
  const reach = (state.to - state.from) / width; // small blocks can be hit one pixel off
  const time = timeAt(x);
  let item = itemAt(lanes[lane], time);
  if (item === NOTHING) item = itemAt(lanes[lane], time + reach);
  return { lane, item, time };
}

