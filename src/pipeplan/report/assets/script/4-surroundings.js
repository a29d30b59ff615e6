// What stands around the lanes: labels, phases, the scale of time.
  if (state.focus === NOTHING || !lanes[state.focusLane]) return;
  const lane = lanes[state.focusLane], x = xOf(start[state.focus]);
  const wide = Math.max((xOf(end[state.focus]) - x) * lane.pace, 3);
  context.strokeStyle = colours.text;
  context.lineWidth = 2;
  context.strokeRect(x, HEAD + lane.y - top, wide, lane.height);
}
function drawLabels(visible, top) {
  context.font = "12px ui-sans-serif, system-ui, sans-serif";
  context.textBaseline = "middle";
  for (const lane of visible) {
    const y = HEAD + lane.y + lane.height / 2 - top + 0.5;
    if (lane.chip) {
      context.fillStyle = data.stages[groups[lane.stage].stages[0]].colour;
      context.beginPath();
      context.roundRect(0, y - 8, 24, 16, 5);
      context.fill();
      context.fillStyle = "#fff";
      context.textAlign = "center";
      context.fillText(lane.chip, 12, y);
    }
    context.textAlign = "right";
    context.fillStyle = lane.thin ? colours.quiet : colours.text;
    context.font = lane.thin ? "9px ui-sans-serif, system-ui, sans-serif" : "12px ui-sans-serif, system-ui, sans-serif";
    context.fillText(fit(context, lane.label, labels - 36), labels - 8, y);
    context.font = "12px ui-sans-serif, system-ui, sans-serif";
  }
}
function fit(target, text, room) {
  if (target.measureText(text).width <= room) return text;
  let size = text.length;
  while (size > 1 && target.measureText(text.slice(0, size) + "…").width > room) size--;
  return text.slice(0, size) + "…";
}
function tickStep(span, most) {
  const power = 10 ** Math.floor(Math.log10(span / most));
  return [1, 2, 5, 10, 20].map((factor) => factor * power).find((step) => step * most >= span * 0.999);
}
function drawHead() {
  const right = width - 8;
  context.save();
  context.beginPath();
  context.rect(labels - 20, 0, right - labels + 28, HEAD);
  context.clip();
  context.textBaseline = "middle";
  context.font = "11px ui-sans-serif, system-ui, sans-serif";
  context.textAlign = "center";
  for (const phase of data.phases) {
    const x = Math.max(xOf(phase.start_ms), labels), stop = Math.min(xOf(phase.end_ms), right);
    if (stop - x < 2) continue;
    context.fillStyle = colours.lane;
    context.fillRect(x + 0.5, 1, stop - x - 1, 14);
    context.fillStyle = colours.quiet;
    if (stop - x > phase.name.length * 6 + 6) context.fillText(phase.name, (x + stop) / 2, 8.5);
  }
  const span = state.to - state.from, step = tickStep(span, Math.max(2, Math.floor((right - labels) / 90)));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  for (let tick = Math.ceil(state.from / step - 1e-9); tick * step <= state.to * (1 + 1e-12); tick++) {
    const x = xOf(tick * step);
    context.beginPath();
    context.moveTo(x, HEAD - 6);
    context.lineTo(x, HEAD - 2);
    context.stroke();
    context.fillStyle = colours.quiet;
    context.textAlign = x > right - 26 ? "right" : x < labels + 12 ? "left" : "center";
    context.fillText((tick * step).toFixed(digits) + (tick === Math.ceil(state.from / step - 1e-9) ? " ms" : ""),
      context.textAlign === "right" ? right : x, 26);
  }
  context.restore();
  context.strokeStyle = colours.line;
  context.setLineDash([2, 3]);
  for (const phase of data.phases.slice(1)) {
    const x = xOf(phase.start_ms);
    if (x <= labels || x >= right) continue;
    context.beginPath();
    context.moveTo(x, 16);
    context.lineTo(x, height);
    context.stroke();
  }
  context.setLineDash([]);
}
function drawCursor(target, from, to) {
  if (state.cursor === null || state.cursor < state.from || state.cursor > state.to) return;
  target.strokeStyle = colours.quiet;
  target.lineWidth = 0.7;
  target.beginPath();
  target.moveTo(xOf(state.cursor), from);
  target.lineTo(xOf(state.cursor), to);
  target.stroke();
}

