// What part of the timeline is shown, and which lanes.
const view = byId("view"), spacer = byId("spacer"), canvas = byId("timeline"), tip = byId("tip");
const context = canvas.getContext("2d");
const memoryCanvas = byId("memory"), memoryContext = memoryCanvas.getContext("2d");
const HEAD = 40, THIN = 7, GAP = 3;
const numDevices = groups.reduce((sum, group) => sum + group.devices.length, 0);
const state = {
  from: 0, to: total || 1, byDevice: !summary && (numDevices <= 32 || numDevices === G), transfers: true, critical: false,
  follow: NOTHING, focus: NOTHING, focusLane: 0, cursor: null, printing: false,
  engaged: false, // after a click the wheel zooms, until the pointer leaves
};
let colours = {}, lanes = [], lanesHeight = 0, width = 0, height = 0, labels = 0, frame = 0;

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "text", "quiet", "line", "lane", "forward", "backward", "weight", "reduce", "there",
    "back", "slowed", "critical", "accent", "bad", "on-forward", "on-backward", "on-weight", "on-reduce"]) colours[name] = style.getPropertyValue("--" + name).trim();
  colours.mixes = [0, 0.25, 0.5, 0.75, 1].map((part) => mix(colours.forward, colours.backward, part));
}
function mix(a, b, part) {
  const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const from = parse(a), to = parse(b);
  return `rgb(${from.map((value, at) => Math.round(value + (to[at] - value) * part)).join(" ")})`;
}

function layOut() {
  lanes = [];
  let y = 0;
  const add = (lane, tall) => { lanes.push({ ...lane, y, height: tall }); y += tall + GAP; };
  const tall = G > 24 || (state.byDevice && numDevices > 16) ? 18 : 24;
  groups.forEach((group, n) => {
    const first = given ? given.first_block[n] : summary ? 0 : n * 2 * M;
    const count = given ? given.first_block[n + 1] - first : summary ? 0 : 2 * M, reduces = reducesOf(n);
    const done = Math.max(count ? end[first + count - 1] : 0, ...reduces.map((i) => end[i]));
    const lane = { first, count, reduces, done, stage: n, row: 3 * n };
    if (state.byDevice) {
      group.devices.forEach((device, k) => add({ ...lane, pace: device.pace, label: shown(device.name), chip: k === 0 ? String(n) : "" }, tall));
    } else {
      const many = group.devices.length > 1 ? ` ×${group.devices.length}` : "";
      add({ ...lane, pace: 1, label: `${noun} ${n}${many}`, chip: String(n) }, tall);
    }
    for (const c of state.transfers && !(summary && data.groups) ? group.stages : []) {
      if (c >= C || groupOf[c] === groupOf[c + 1]) continue;
      for (const direction of [FORWARD, BACKWARD]) {
        const sent = given ? given.first_sent[2 * c + direction] : FIRST_TRANSFER + (2 * c + direction) * M;
        add({ first: summary ? 0 : sent, count: summary ? 0 : M, reduces: [], done: 0,
          stage: c, row: 3 * c + 1 + direction, pace: 1, thin: true, direction, label: direction === FORWARD ? `${c} → ${c + 1}` : `${c} ← ${c + 1}` }, THIN);
      }
    }
    y += state.transfers ? 2 : 0;
  });
  lanesHeight = y;
  resize();
}

// On paper the canvas has a fixed width and is scaled as a whole, so that no text is squeezed.
const PRINTED_WIDTH = 720;
const ownWidth = () => (state.printing ? PRINTED_WIDTH : Math.max(view.clientWidth, 200));
function resize() {
  width = ownWidth();
  labels = width < 520 ? 74 : 118;
  const whole = HEAD + lanesHeight + 4;
  const most = state.printing ? 2400 : Math.min(window.innerHeight * 0.74, 900);
  height = Math.min(whole, Math.max(most, 160));
  spacer.style.height = state.printing ? "auto" : whole + "px";
  size(canvas, context, width, height);
  sizeMemory();
  draw();
}
function size(target, targetContext, wide, tall) {
  const ratio = state.printing ? 2 : Math.min(window.devicePixelRatio || 1, 2);
  target.width = Math.round(wide * ratio);
  target.height = Math.round(tall * ratio);
  target.style.height = state.printing ? "auto" : tall + "px";
  targetContext.setTransform(ratio, 0, 0, ratio, 0, 0);
}

const xOf = (time) => labels + (time - state.from) / (state.to - state.from) * (width - labels - 8);
const timeAt = (x) => state.from + (x - labels) / (width - labels - 8) * (state.to - state.from);

function show(from, to) {
  const whole = total || 1, least = Math.max(whole * 1e-6, 1e-6);
  const span = Math.min(Math.max(to - from, least), whole);
  from = Math.min(Math.max(from, 0), whole - span);
  state.from = from;
  state.to = from + span;
  redraw();
}
const isWhole = () => state.to - state.from >= (total || 1) * 0.999999;
function zoom(factor, x = labels + (width - labels) / 2) {
  const at = timeAt(x);
  show(at - (at - state.from) * factor, at + (state.to - at) * factor);
}
const pan = (part) => show(state.from + part * (state.to - state.from), state.to + part * (state.to - state.from));
function redraw() {
  if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw(); });
}

// The first item of [low, high) that ends after a time: ends ascend along a lane.
function firstEndingAfter(time, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}
// The time that a lane was busy, and busy with backwards, before a time.
function busyUntil(time, lane) {
  if (summary) return summaryUntil(time, lane.row);
  const i = firstEndingAfter(time, lane.first, lane.first + lane.count);
  const part = i < lane.first + lane.count ? Math.max(time - start[i], 0) : 0;
  return [busyBefore[i] - busyBefore[lane.first] + part,
    backBefore[i] - backBefore[lane.first] + (i < ITEMS && isBack(i) ? part : 0)];
}
function laneAt(y) {
  for (let k = 0; k < lanes.length; k++) if (y >= lanes[k].y - 1 && y < lanes[k].y + lanes[k].height + GAP - 1) return k;
  return -1;
}
function laneOf(i) {
  return lanes.findIndex((lane) => (i >= lane.first && i < lane.first + lane.count) || lane.reduces.includes(i));
}
function itemAt(lane, time) {
  const i = firstEndingAfter(time, lane.first, lane.first + lane.count);
  if (i < lane.first + lane.count && start[i] <= time) return i;
  const reduce = lane.reduces.find((k) => time >= start[k] && time < end[k]);
  return reduce === undefined ? NOTHING : reduce;
}

// The same from a summary: whole bins, and a part of the bin that holds the time.
const bins = summary ? summary.bins : 0;
const binMs = total / (bins || 1) || 1;
const sums = summary ? { busy: sumRows(summary.busy), back: sumRows(summary.backward) } : null;
function sumRows(text) {
  const parts = unpack(text, Uint8Array), rows = parts.length / bins, result = new Float64Array(rows * (bins + 1));
  for (let row = 0; row < rows; row++) {
    for (let k = 0; k < bins; k++) result[row * (bins + 1) + k + 1] = result[row * (bins + 1) + k] + parts[row * bins + k] / 255 * binMs;
  }
  return result;
}
function summaryUntil(time, row) {
  const at = Math.min(Math.max(time / binMs, 0), bins), k = Math.min(Math.floor(at), bins - 1), first = row * (bins + 1) + k;
  return [sums.busy, sums.back].map((list) => list[first] + (list[first + 1] - list[first]) * (at - k));
}
