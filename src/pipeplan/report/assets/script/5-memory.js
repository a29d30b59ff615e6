// Memory over time: a row for the devices of a group that need the same, their names beside it.
const ROW = 60, MOST_PRINTED_ROWS = 200;
const memoryRows = [];
groups.forEach((group, n) => {
  const rows = new Map();
  for (const device of group.devices) {
    const key = JSON.stringify([device.base_gb, device.per_microbatch_gb, device.limit_gb]);
    if (!rows.has(key)) rows.set(key, { ...device, stage: n, names: [] });
    rows.get(key).names.push(shown(device.name));
  }
  memoryRows.push(...rows.values());
});

// The steps of a stage: from each time on it holds so many microbatches. A summary has a step a bin. A group
// holds bytes, and has two steps a block: while it runs, and once it has ended.
const memoryTime = (i) => (kind[i] === FORWARD ? start[i] : end[i]);
const STEPS = summary ? bins : 2 * M;
const inFlight = given ? unpack(given.held, Float64Array)
  : summary ? unpack(summary.in_flight, data.groups ? Float64Array : Int32Array) : new Int32Array(FIRST_TRANSFER);
for (let i = 0; i < FIRST_TRANSFER && !given; i++) {
  inFlight[i] = (i % STEPS ? inFlight[i - 1] : 0) + (kind[i] === FORWARD ? 1 : -1);
}
const stepTime = (i) => (given ? (i % 2 ? end : start)[i >> 1] : summary ? (i % STEPS) * binMs : memoryTime(i));
const firstStep = (g) => (given ? 2 * given.first_block[g] : g * STEPS);
function firstStepAfter(stage, time) {
  let low = firstStep(stage), high = firstStep(stage + 1);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (stepTime(middle) <= time) low = middle + 1; else high = middle;
  }
  return low;
}
function heldAt(stage, time) {
  const next = firstStepAfter(stage, time);
  return next > firstStep(stage) ? inFlight[next - 1] : 0;
}

let memoryHeight = 0;
function sizeMemory() {
  const box = byId("memory-view"), whole = memoryRows.length * ROW;
  memoryHeight = state.printing ? Math.min(whole, MOST_PRINTED_ROWS * ROW) : Math.min(whole, window.innerHeight * 0.6, 640);
  byId("memory-spacer").style.height = state.printing ? "auto" : whole + "px";
  size(memoryCanvas, memoryContext, state.printing ? PRINTED_WIDTH : Math.max(box.clientWidth, 200), memoryHeight);
}
const gb = (value) => (value >= 1 ? `${value.toPrecision(3)} GB` : `${(value * 1e3).toPrecision(3)} MB`);
function drawMemory() {
  const top = state.printing ? 0 : byId("memory-view").scrollTop;
  memoryContext.clearRect(0, 0, width, memoryHeight);
  memoryRows.forEach((row, k) => {
    const base = (k + 1) * ROW - 8 - top;
    if (base > -20 && base - ROW < memoryHeight) drawMemoryRow(row, base, ROW - 18);
  });
  drawCursor(memoryContext, 0, memoryHeight);
}
function drawMemoryRow(row, base, tall) {
  const target = memoryContext, right = width - 8;
  const over = row.limit_gb !== null && row.peak_gb > row.limit_gb * (1 + 1e-9);
  // Up to the limit, but not so far up that nothing can be seen of the curve.
  const most = Math.max(row.peak_gb, Math.min(row.limit_gb === null ? 0 : row.limit_gb, 4 * row.peak_gb)) || 1;
  target.fillStyle = colours.lane;
  target.fillRect(labels, base - tall, right - labels, tall);
  drawMemoryCurve(row, base, (held) => base - tall * (row.base_gb + held * row.per_microbatch_gb) / most);
  target.globalAlpha = 0.75;
  target.fillStyle = over ? colours.bad : data.stages[groups[row.stage].stages[0]].colour;
  target.fill();
  target.globalAlpha = 1;
  if (row.limit_gb !== null && row.limit_gb <= most) {
    const limitY = base - tall * row.limit_gb / most;
    target.strokeStyle = over ? colours.bad : colours.quiet;
    target.lineWidth = 1;
    target.setLineDash([5, 4]);
    target.beginPath();
    target.moveTo(labels, limitY + 0.5);
    target.lineTo(right, limitY + 0.5);
    target.stroke();
    target.setLineDash([]);
  }
  target.textBaseline = "middle";
  target.textAlign = "right";
  target.font = "12px ui-sans-serif, system-ui, sans-serif";
  target.fillStyle = colours.text;
  target.fillText(fit(target, row.names.slice(0, 8).join(" "), labels - 12), labels - 8, base - tall + 8);
  target.fillStyle = over ? colours.bad : colours.quiet;
  target.font = "11px ui-sans-serif, system-ui, sans-serif";
  target.fillText(gb(row.peak_gb), labels - 8, base - tall + 23);
  target.fillText(row.limit_gb === null ? "no limit" : `of ${gb(row.limit_gb)}`, labels - 8, base - tall + 36);
}
// The path of one row; steps within one column of pixels are drawn as their peak.
function drawMemoryCurve(row, base, yOf) {
  const target = memoryContext, first = firstStep(row.stage), last = firstStep(row.stage + 1);
  const low = firstStepAfter(row.stage, state.from);
  let x = labels, y = yOf(low > first ? inFlight[low - 1] : 0), peak = y;
  target.beginPath();
  target.moveTo(labels, base);
  target.lineTo(labels, y);
  for (let i = low; i < last && stepTime(i) < state.to; i++) {
    const nextX = xOf(stepTime(i)), nextY = yOf(inFlight[i]);
    if (nextX - x < 0.8) { peak = Math.min(peak, nextY); y = nextY; continue; }
    target.lineTo(x, peak);
    target.lineTo(x, y);
    target.lineTo(nextX, y);
    target.lineTo(nextX, nextY);
    x = nextX; y = peak = nextY;
  }
  target.lineTo(x, y);
  const stop = Math.min(width - 8, xOf(total));
  target.lineTo(stop, y);
  target.lineTo(stop, base);
}
