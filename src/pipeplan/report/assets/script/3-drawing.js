// The timeline on its canvas.
const rects = { forward: [], backward: [], weight: [], there: [], back: [], reduce: [], slowed: [] };
const texts = [], stripes = [];
const NAMES = ["forward", "backward", "reduce", "backward", "weight"]; // the colours of kinds
const STRIPE = 3; // its colour tells the stage, where a lane has several

function draw() {
  const top = state.printing ? 0 : view.scrollTop;
  context.clearRect(0, 0, width, height);
  for (const name in rects) rects[name].length = 0;
  texts.length = 0;
  const visible = lanes.filter((lane) => lane.y + lane.height >= top && lane.y <= top + height - HEAD);
  context.save();
  context.beginPath();
  context.rect(0, HEAD, width, height - HEAD);
  context.clip();
  context.fillStyle = colours.lane;
  for (const lane of visible) context.fillRect(labels, HEAD + lane.y - top, width - labels - 8, lane.height);
  context.save();
  context.beginPath();
  context.rect(labels, HEAD, width - labels - 8, height - HEAD);
  context.clip();
  const following = state.follow !== NOTHING;
  if (following) context.globalAlpha = 0.2;
  for (const lane of visible) drawLane(lane, HEAD + lane.y - top);
  flush();
  context.globalAlpha = 1;
  if (following) drawMicrobatch(top);
  drawTexts(following);
  if (state.critical) drawPath(critical, colours.critical, 2.5, top);
  drawFocus(top);
  context.restore();
  drawLabels(visible, top);
  context.restore();
  drawHead();
  drawCursor(context, HEAD, height);
  drawMemory();
}

function drawLane(lane, y) {
  const last = lane.first + lane.count, perMs = (width - labels - 8) / (state.to - state.from);
  const begin = firstEndingAfter(state.from, lane.first, last), stop = firstEndingAfter(state.to, begin, last) + 1;
  const seen = Math.min(stop, last) - begin;
  const name = lane.thin ? (lane.direction === FORWARD ? "there" : "back") : "";
  const span = Math.min(state.to, end[last - 1]) - Math.max(state.from, start[lane.first]);
  if (summary || (seen > 0 && span * perMs / seen < 1.6)) drawDensity(lane, y, name);
  else {
    for (let i = begin; i < stop && i < last; i++) {
      if (start[i] > state.to) break;
      const x = xOf(start[i]), wide = (end[i] - start[i]) * perMs * lane.pace;
      const shown = wide > 3 ? wide - 0.8 : Math.max(wide, 0.5); // the gap tells neighbours apart
      rects[name || NAMES[kind[i]]].push(x, y, shown, lane.height);
      if (!lane.thin && groups[lane.stage].stages.length > 1) stripes.push(x, y + lane.height - STRIPE, shown, place[i]);
      if (slowed.has(i)) rects.slowed.push(x, y + lane.height - 2, shown, 2);
      if (!lane.thin && wide > 12) addText(i, x, wide, y, lane.height);
    }
  }
  const computed = lane.count ? end[last - 1] : 0;
  for (const i of lane.reduces) {
    if (end[i] <= state.from || end[i] <= start[i]) continue;
    if (start[i] < computed) { // beside computing: a line above the blocks
      const x = xOf(start[i]);
      rects.reduce.push(x, y, Math.max(xOf(Math.min(end[i], computed)) - x, 1), 2.5);
    }
    const x = xOf(Math.max(start[i], computed)), wide = xOf(end[i]) - x;
    if (wide <= 0) continue;
    rects.reduce.push(x, y, Math.max(wide - (lane.reduces.length > 1 && wide > 4 ? 0.8 : 0), 1), lane.height);
    if (slowed.has(i)) rects.slowed.push(x, y + lane.height - 2, Math.max(wide, 1), 2);
    if (wide > 66) texts.push("all-reduce", x + wide / 2, y + lane.height / 2, -1, "on-reduce");
  }
}
function addText(i, x, wide, y, tall) {
  // With its letter if the longest number fits beside it, so that neighbours look alike.
  const several = groups[groupOf[place[i]]].stages.length > 1, letters = several ? String(S - 1).length + 1 : 1;
  const short = several ? place[i] + LETTERS[kind[i]] : String(microbatch[i]);
  const text = wide > (String(M - 1).length + letters) * 6.8 + 5 ? longCode(i) : short;
  const left = Math.max(x, labels), right = Math.min(x + wide, width - 8);
  if (right - left > text.length * 6.4 + 2) texts.push(text, (left + right) / 2, y + tall / 2, microbatch[i], "on-" + NAMES[kind[i]]);
}
// Blocks below a pixel or two: how busy each column is, and how much of that is backward.
function drawDensity(lane, y, name) {
  const step = 2, right = width - 8;
  const alpha = context.globalAlpha;
  let runX = labels, style = "", level = 0, before = busyUntil(timeAt(labels), lane);
  for (let x = labels; x <= right; x += step) {
    let nextStyle = "", nextLevel = 0;
    if (x < right) {
      const after = busyUntil(timeAt(Math.min(x + step, right)), lane);
      const whole = timeAt(x + step) - timeAt(x), busy = after[0] - before[0];
      nextLevel = busy > whole * 1e-6 ? Math.max(1, Math.round(Math.min(busy / whole, 1) * 8)) : 0; // a little is not nothing
      nextStyle = name ? colours[name] : colours.mixes[Math.round(busy > 0 ? (after[1] - before[1]) / busy * 4 : 0)];
      before = after;
    }
    if (nextStyle !== style || nextLevel !== level || x >= right) {
      if (level) {
        context.globalAlpha = alpha * level / 8;
        context.fillStyle = style;
        context.fillRect(runX, y, Math.min(x, right) - runX, lane.height);
      }
      runX = x; style = nextStyle; level = nextLevel;
    }
  }
  context.globalAlpha = alpha;
}
function flush() {
  for (const name in rects) {
    const list = rects[name];
    context.fillStyle = colours[name];
    for (let k = 0; k < list.length; k += 4) context.fillRect(list[k], list[k + 1], list[k + 2], list[k + 3]);
    list.length = 0;
  }
  for (let k = 0; k < stripes.length; k += 4) {
    context.fillStyle = data.stages[stripes[k + 3]].colour;
    context.fillRect(stripes[k], stripes[k + 1], stripes[k + 2], STRIPE);
  }
  stripes.length = 0;
}
function drawTexts(following) {
    context.font = "11px ui-sans-serif, system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let k = 0; k < texts.length; k += 5) {
    if (following && texts[k + 3] !== state.follow) continue;
    context.fillStyle = colours[texts[k + 4]];
    context.fillText(texts[k], texts[k + 1], texts[k + 2] + 0.5);
  }
}
function travel(m) {
  const path = [];
  for (let n = 0; n < S; n++) {
    path.push(numberOf[slot(0, FORWARD, n, m)]);
    if (n < C) path.push(numberOf[slot(1, FORWARD, n, m)]);
  }
  for (let n = S - 1; n >= 0; n--) {
    path.push(numberOf[slot(0, BACKWARD, n, m)]);
    if (n > 0) path.push(numberOf[slot(1, BACKWARD, n - 1, m)]);
  }
  return path.filter((i) => i !== NOTHING); // inside a group nothing is sent
}
function drawMicrobatch(top) {
  drawPath(travel(state.follow), colours.accent, 1.2, top, [3, 3]);
  for (const lane of lanes) {
    const y = HEAD + lane.y - top;
    if (y > height || y + lane.height < HEAD) continue;
    const mine = lane.thin ? [numberOf[slot(1, lane.direction, lane.stage, state.follow)]]
      : groups[lane.stage].stages.flatMap((n) => [numberOf[slot(0, FORWARD, n, state.follow)],
        numberOf[slot(0, BACKWARD, n, state.follow)], weightOf.get(n * M + state.follow) ?? NOTHING]);
    for (const i of mine) {
      if (i === NOTHING) continue;
      const x = xOf(start[i]), wide = Math.max((xOf(end[i]) - x) * lane.pace, 2.5);
      rects[lane.thin ? ["there", "back"][lane.direction] : NAMES[kind[i]]].push(x, y, wide, lane.height);
    }
  }
  flush();
}
// A line along items, low in their lanes so that labels stay readable; points within a pixel are one.
function drawPath(path, colour, wide, top, dash = []) {
  const levels = new Map();
  lanes.forEach((lane) => {
    const key = lane.thin ? `t${lane.stage}${lane.direction}` : `s${lane.stage}`;
    if (!levels.has(key)) levels.set(key, HEAD + lane.y + lane.height * (lane.thin ? 0.5 : 0.86) - top);
  });
  const yOf = (i) => levels.get(isTransfer(i) ? `t${place[i]}${kind[i]}` : `s${groupOf[place[i]]}`);
  for (const [style, extra] of [[colours.card, dash.length ? 0 : 2.5], [colour, 0]]) {
    if (style === colours.card && !extra) continue;
    context.strokeStyle = style;
    context.lineWidth = wide + extra;
    context.lineJoin = "round";
    context.setLineDash(dash);
    context.beginPath();
    let lastX = -1e9, lastY = 0, open = false;
    for (const i of path) {
      if (end[i] < state.from && !open) continue;
      const y = yOf(i);
      if (y === undefined) continue;
      for (const x of [xOf(start[i]), xOf(end[i])]) {
        if (open && Math.abs(x - lastX) < 0.7 && y === lastY) continue;
        if (open) context.lineTo(x, y); else context.moveTo(x, y);
        open = true; lastX = x; lastY = y;
      }
      if (start[i] > state.to) break;
    }
    context.stroke();
  }
  context.setLineDash([]);
}
function drawFocus(top) {
