"use strict";
// The interactive half of the report. Times are milliseconds, sizes CSS pixels, items numbered as
// in drawing.py: blocks stage by stage, transfers by channel and direction, one all-reduce a stage.
// Text from the inputs only ever becomes textContent or canvas text.
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("timeline-data").textContent);

  // ------------------------------------------------------------------------------ the items
  function unpack(text, Kind) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Kind(bytes.buffer);
  }
  const M = data.microbatches, S = data.stages.length, C = S - 1, total = data.iteration_ms;
  const FIRST_TRANSFER = 2 * M * S, FIRST_REDUCE = FIRST_TRANSFER + 2 * M * C, ITEMS = FIRST_REDUCE + S;
  const FORWARD = 0, BACKWARD = 1, REDUCE = 2, NOTHING = -1;
  const start = new Float64Array(ITEMS), end = new Float64Array(ITEMS);
  const kind = new Uint8Array(ITEMS), microbatch = new Int32Array(ITEMS), place = new Int32Array(ITEMS);
  const waits = unpack(data.waits, Int32Array);
  const numberOf = new Int32Array(4 * M * S).fill(NOTHING); // of blocks, then transfers, by kind, place
  const slot = (isTransfer, direction, where, m) => ((isTransfer * 2 + direction) * S + where) * M + m;

  function loadItems() {
    const blockStarts = unpack(data.block_start_ms, Float64Array), order = unpack(data.order, Int32Array);
    const sendStarts = unpack(data.transfer_start_ms, Float64Array), sent = unpack(data.sent, Int32Array);
    start.set(blockStarts, 0);
    start.set(sendStarts, FIRST_TRANSFER);
    for (let i = 0; i < FIRST_TRANSFER; i++) {
      const stage = Math.floor(i / (2 * M)), code = order[i];
      kind[i] = code >= 0 ? FORWARD : BACKWARD;
      microbatch[i] = code >= 0 ? code : -1 - code;
      place[i] = stage;
      end[i] = start[i] + (code >= 0 ? data.stages[stage].forward_ms : data.stages[stage].backward_ms);
      numberOf[slot(0, kind[i], stage, microbatch[i])] = i;
    }
    for (let i = FIRST_TRANSFER; i < FIRST_REDUCE; i++) {
      const lane = Math.floor((i - FIRST_TRANSFER) / M);
      kind[i] = lane % 2;
      place[i] = lane >> 1;
      microbatch[i] = sent[i - FIRST_TRANSFER];
      const stage = data.stages[place[i]];
      end[i] = start[i] + (kind[i] === FORWARD ? stage.send_ms : stage.return_ms);
      numberOf[slot(1, kind[i], place[i], microbatch[i])] = i;
    }
    for (let n = 0; n < S; n++) {
      const i = FIRST_REDUCE + n;
      [start[i], end[i]] = data.stages[n].all_reduce;
      kind[i] = REDUCE;
      place[i] = n;
      microbatch[i] = -1;
    }
  }
  loadItems();

  // How long a lane was busy, and with backwards, up to each item: the density of what is too small.
  const busyBefore = new Float64Array(ITEMS + 1), backBefore = new Float64Array(ITEMS + 1);
  for (let i = 0; i < ITEMS; i++) {
    busyBefore[i + 1] = busyBefore[i] + end[i] - start[i];
    backBefore[i + 1] = backBefore[i] + (kind[i] === BACKWARD ? end[i] - start[i] : 0);
  }
  const critical = [];
  for (let i = data.last; i !== NOTHING; i = waits[i]) critical.push(i);
  critical.reverse();

  const isBlock = (i) => i < FIRST_TRANSFER;
  const isTransfer = (i) => i >= FIRST_TRANSFER && i < FIRST_REDUCE;
  const code = (i) => (kind[i] === FORWARD ? "F" : "B") + microbatch[i];
  function nameOf(i) {
    if (i === NOTHING) return "the start";
    if (kind[i] === REDUCE) return `all-reduce of stage ${place[i]}`;
    if (isBlock(i)) return `${code(i)} on stage ${place[i]}`;
    const ends = kind[i] === FORWARD ? [place[i], place[i] + 1] : [place[i] + 1, place[i]];
    return `transfer of ${code(i)} from stage ${ends[0]} to ${ends[1]}`;
  }
  function ms(value) {
    const size = Math.abs(value);
    return (size >= 1000 ? value.toFixed(1) : size >= 10 ? value.toFixed(2) : value.toFixed(3)) + " ms";
  }

  // -------------------------------------------------------------------------------- the view
  const view = byId("view"), spacer = byId("spacer"), canvas = byId("timeline"), tip = byId("tip");
  const context = canvas.getContext("2d");
  const memoryCanvas = byId("memory"), memoryContext = memoryCanvas.getContext("2d");
  const HEAD = 40, THIN = 7, GAP = 3;
  const numDevices = data.stages.reduce((sum, stage) => sum + stage.devices.length, 0);
  const state = {
    from: 0, to: total || 1, byDevice: numDevices <= 32 || numDevices === S, transfers: true, critical: false,
    follow: NOTHING, focus: NOTHING, focusLane: 0, cursor: null, printing: false,
  };
  let colours = {}, lanes = [], lanesHeight = 0, width = 0, height = 0, labels = 0, frame = 0;

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["card", "text", "quiet", "line", "lane", "forward", "backward", "reduce", "there",
      "back", "critical", "accent", "bad", "on-block"]) colours[name] = style.getPropertyValue("--" + name).trim();
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
    const tall = S > 24 || (state.byDevice && numDevices > 16) ? 18 : 24;
    data.stages.forEach((stage, n) => {
      const first = n * 2 * M, count = 2 * M, reduce = FIRST_REDUCE + n;
      if (state.byDevice) {
        stage.devices.forEach((device, k) => add(
          { first, count, reduce, stage: n, pace: device.pace, label: device.name, chip: k === 0 ? String(n) : "" }, tall));
      } else {
        const many = stage.devices.length > 1 ? ` ×${stage.devices.length}` : "";
        add({ first, count, reduce, stage: n, pace: 1, label: `stage ${n}${many}`, chip: String(n) }, tall);
      }
      if (state.transfers && n < C) {
        for (const direction of [FORWARD, BACKWARD]) {
          add({ first: FIRST_TRANSFER + (2 * n + direction) * M, count: M, reduce: NOTHING, stage: n, pace: 1,
            thin: true, direction, label: direction === FORWARD ? `${n} → ${n + 1}` : `${n} ← ${n + 1}` }, THIN);
        }
      }
      y += state.transfers ? 2 : 0;
    });
    lanesHeight = y;
    resize();
  }

  function resize() {
    width = Math.max(view.clientWidth, 200);
    labels = width < 520 ? 74 : 118;
    const whole = HEAD + lanesHeight + 4;
    const most = state.printing ? 2400 : Math.min(window.innerHeight * 0.74, 900);
    height = Math.min(whole, Math.max(most, 160));
    spacer.style.height = (state.printing ? height : whole) + "px";
    size(canvas, context, width, height);
    sizeMemory();
    draw();
  }
  function size(target, targetContext, wide, tall) {
    const ratio = state.printing ? 2 : Math.min(window.devicePixelRatio || 1, 2);
    target.width = Math.round(wide * ratio);
    target.height = Math.round(tall * ratio);
    target.style.height = tall + "px";
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

  // ------------------------------------------------------------------------------- searching
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
    const i = firstEndingAfter(time, lane.first, lane.first + lane.count);
    const part = i < lane.first + lane.count ? Math.max(time - start[i], 0) : 0;
    return [busyBefore[i] - busyBefore[lane.first] + part,
      backBefore[i] - backBefore[lane.first] + (i < ITEMS && kind[i] === BACKWARD ? part : 0)];
  }
  function laneAt(y) {
    for (let k = 0; k < lanes.length; k++) if (y >= lanes[k].y - 1 && y < lanes[k].y + lanes[k].height + GAP - 1) return k;
    return -1;
  }
  function laneOf(i) {
    return lanes.findIndex((lane) => (i >= lane.first && i < lane.first + lane.count) || i === lane.reduce);
  }
  function itemAt(lane, time) {
    if (lane.reduce !== NOTHING && time >= start[lane.reduce] && time < end[lane.reduce]) return lane.reduce;
    const i = firstEndingAfter(time, lane.first, lane.first + lane.count);
    return i < lane.first + lane.count && start[i] <= time ? i : NOTHING;
  }

  // --------------------------------------------------------------------------------- drawing
  const rects = { forward: [], backward: [], there: [], back: [], reduce: [] };
  const texts = [];

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
    if (seen > 0 && span * perMs / seen < 1.6) drawDensity(lane, y, name);
    else {
      for (let i = begin; i < stop && i < last; i++) {
        if (start[i] > state.to) break;
        const x = xOf(start[i]), wide = (end[i] - start[i]) * perMs * lane.pace;
        const shown = wide > 3 ? wide - 0.8 : Math.max(wide, 0.5); // the gap tells neighbours apart
        rects[name || (kind[i] === FORWARD ? "forward" : "backward")].push(x, y, shown, lane.height);
        if (!lane.thin && wide > 12) addText(i, x, wide, y, lane.height);
      }
    }
    if (lane.reduce !== NOTHING && end[lane.reduce] > state.from && end[lane.reduce] > start[lane.reduce]) {
      const x = xOf(start[lane.reduce]), wide = xOf(end[lane.reduce]) - x;
      rects.reduce.push(x, y, Math.max(wide, 1), lane.height);
      if (wide > 66) texts.push("all-reduce", x + wide / 2, y + lane.height / 2, -1);
    }
  }
  function addText(i, x, wide, y, tall) {
    // With its letter if the longest number fits beside it, so that neighbours look alike.
    const text = wide > (String(M - 1).length + 1) * 6.8 + 5 ? code(i) : String(microbatch[i]);
    const left = Math.max(x, labels), right = Math.min(x + wide, width - 8);
    if (right - left > text.length * 6.4 + 2) texts.push(text, (left + right) / 2, y + tall / 2, microbatch[i]);
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
        nextLevel = Math.round(Math.min(busy / whole, 1) * 8);
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
  }
  function drawTexts(following) {
    context.fillStyle = colours["on-block"];
    context.font = "11px ui-sans-serif, system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let k = 0; k < texts.length; k += 4) {
      if (following && texts[k + 3] !== state.follow) continue;
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
    return path;
  }
  function drawMicrobatch(top) {
    const path = travel(state.follow);
    drawPath(path, colours.accent, 1.2, top, [3, 3]);
    const chosen = new Set(path);
    for (const lane of lanes) {
      for (const i of chosen) {
        if (i < lane.first || i >= lane.first + lane.count) continue;
        const x = xOf(start[i]), wide = Math.max((xOf(end[i]) - x) * lane.pace, 2.5);
        const name = lane.thin ? (kind[i] === FORWARD ? "there" : "back") : kind[i] === FORWARD ? "forward" : "backward";
        rects[name].push(x, HEAD + lane.y - top, wide, lane.height);
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
    const yOf = (i) => levels.get(isTransfer(i) ? `t${place[i]}${kind[i]}` : `s${place[i]}`);
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
        context.fillStyle = data.stages[lane.stage].colour;
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

  // ---------------------------------------------------------------------------------- memory
  // A row for the devices of a stage that need the same: their names beside it.
  const ROW = 60;
  const memoryRows = [];
  data.stages.forEach((stage, n) => {
    const rows = new Map();
    for (const device of stage.devices) {
      const key = JSON.stringify([device.base_gb, device.per_microbatch_gb, device.limit_gb]);
      if (!rows.has(key)) rows.set(key, { ...device, stage: n, names: [] });
      rows.get(key).names.push(device.name);
    }
    memoryRows.push(...rows.values());
  });
  const memoryTime = (i) => (kind[i] === FORWARD ? start[i] : end[i]);
  const inFlight = new Int32Array(FIRST_TRANSFER); // from `memoryTime` of each block on
  for (let i = 0; i < FIRST_TRANSFER; i++) {
    inFlight[i] = (i % (2 * M) ? inFlight[i - 1] : 0) + (kind[i] === FORWARD ? 1 : -1);
  }
  function heldAt(stage, time) {
    let low = stage * 2 * M, high = low + 2 * M;
    const first = low;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (memoryTime(middle) <= time) low = middle + 1; else high = middle;
    }
    return low > first ? inFlight[low - 1] : 0;
  }
  function sizeMemory() {
    size(memoryCanvas, memoryContext, Math.max(memoryCanvas.parentElement.clientWidth, 200), memoryRows.length * ROW);
  }
  const gb = (value) => (value >= 1 ? `${value.toPrecision(3)} GB` : `${(value * 1e3).toPrecision(3)} MB`);
  function drawMemory() {
    const target = memoryContext, right = width - 8, box = memoryCanvas.parentElement;
    target.clearRect(0, 0, width, memoryRows.length * ROW);
    memoryRows.forEach((row, k) => {
      const base = (k + 1) * ROW - 8, tall = ROW - 18;
      if (!state.printing && (base < box.scrollTop - 20 || base - ROW > box.scrollTop + box.clientHeight)) return;
      const over = row.limit_gb !== null && row.peak_gb > row.limit_gb * (1 + 1e-9);
      // Up to the limit, but not so far up that nothing can be seen of the curve.
      const most = Math.max(row.peak_gb, Math.min(row.limit_gb === null ? 0 : row.limit_gb, 4 * row.peak_gb)) || 1;
      const yOf = (n) => base - tall * (row.base_gb + n * row.per_microbatch_gb) / most;
      target.fillStyle = colours.lane;
      target.fillRect(labels, base - tall, right - labels, tall);
      const first = row.stage * 2 * M, last = first + 2 * M;
      let low = first, high = last;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (memoryTime(middle) <= state.from) low = middle + 1; else high = middle;
      }
      let held = low > first ? inFlight[low - 1] : 0, x = labels, y = yOf(held), peak = y;
      target.beginPath();
      target.moveTo(labels, base);
      target.lineTo(labels, y);
      for (let i = low; i < last && memoryTime(i) < state.to; i++) {
        const nextX = xOf(memoryTime(i)), nextY = yOf(inFlight[i]);
        if (nextX - x < 0.8) { peak = Math.min(peak, nextY); y = nextY; continue; } // one column: its peak
        target.lineTo(x, peak);
        target.lineTo(x, y);
        target.lineTo(nextX, y);
        target.lineTo(nextX, nextY);
        x = nextX; y = peak = nextY;
      }
      target.lineTo(x, y);
      const stop = Math.min(right, xOf(total));
      target.lineTo(stop, y);
      target.lineTo(stop, base);
      target.globalAlpha = 0.75;
      target.fillStyle = over ? colours.bad : data.stages[row.stage].colour;
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
      target.fillText(fit(target, row.names.join(" "), labels - 12), labels - 8, base - tall + 8);
      target.fillStyle = over ? colours.bad : colours.quiet;
      target.font = "11px ui-sans-serif, system-ui, sans-serif";
      target.fillText(gb(row.peak_gb), labels - 8, base - tall + 23);
      target.fillText(row.limit_gb === null ? "no limit" : `of ${gb(row.limit_gb)}`, labels - 8, base - tall + 36);
    });
    drawCursor(target, 0, memoryRows.length * ROW);
  }

  // --------------------------------------------------------------------------------- tooltip
  function describe(i) {
    const lines = [`${ms(start[i])} to ${ms(end[i])}, takes ${ms(end[i] - start[i])}`];
    if (isBlock(i)) {
      const names = data.stages[place[i]].devices.map((device) => device.name);
      const many = names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
      lines.push(`microbatch ${microbatch[i]} ${kind[i] === FORWARD ? "forward" : "backward"}, ${many}`);
    } else if (isTransfer(i)) lines.push(`microbatch ${microbatch[i]}, ${kind[i] === FORWARD ? "activations" : "gradients"}`);
    if (waits[i] === NOTHING) lines.push("waited for nothing");
    else {
      const busy = isBlock(i) && waits[i] === i - 1;
      const queued = isTransfer(i) && isTransfer(waits[i]);
      lines.push(`waited for ${nameOf(waits[i])}${busy ? " (its devices were busy)" : queued ? " (the link was busy)" : ""}`);
    }
    return [nameOf(i), ...lines];
  }
  function describeGap(lane, time) {
    const last = lane.first + lane.count, next = firstEndingAfter(time, lane.first, last);
    if (lane.thin) return null;
    if (time >= end[lane.reduce]) {
      return [`stage ${lane.stage} idle`, `${ms(total - end[lane.reduce])} until the iteration ends`, `waits for ${nameOf(data.last)}`];
    }
    if (next >= last) return null;
    const from = next > lane.first ? end[next - 1] : 0;
    if (time < from) return null; // between a quick device's end and the slow one's
    return [`stage ${lane.stage} idle`, `${ms(from)} to ${ms(start[next])}, ${ms(start[next] - from)}`, `${code(next)} waits for ${nameOf(waits[next])}`];
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

  // -------------------------------------------------------------------- mouse, touch and keys
  const pointers = new Map();
  let dragged = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    dragged = 0;
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
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; state.cursor = null; redraw(); });
  canvas.addEventListener("dblclick", () => show(0, total));
  canvas.addEventListener("wheel", (event) => {
    const x = event.clientX - canvas.getBoundingClientRect().left;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / width);
    } else if (event.deltaY < 0 || !isWhole()) { // at the whole iteration the page scrolls on
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
    if (state.focus === NOTHING) { focusOn(lanes[0].first, 0); return; }
    const lane = lanes[state.focusLane], last = lane.first + lane.count - 1;
    const reduces = lane.reduce !== NOTHING && end[lane.reduce] > start[lane.reduce];
    let next = state.focus + by;
    if (state.focus === lane.reduce) next = by < 0 ? last : lane.reduce;
    else if (next > last) next = reduces ? lane.reduce : last;
    focusOn(Math.max(next, lane.first), state.focusLane);
  }
  function changeLane(by) {
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
    Escape: () => { follow(NOTHING); focusOn(NOTHING); setCritical(false); },
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
  memoryCanvas.parentElement.addEventListener("scroll", redraw, { passive: true });
  memoryCanvas.addEventListener("pointermove", (event) => {
    const box = memoryCanvas.getBoundingClientRect(), x = event.clientX - box.left;
    const row = memoryRows[Math.floor((event.clientY - box.top) / ROW)];
    if (!row || x < labels) { showTip(null); return; }
    state.cursor = timeAt(x);
    const held = heldAt(row.stage, state.cursor);
    showTip([`${gb(row.base_gb + held * row.per_microbatch_gb)} on ${fitNames(row.names)}`,
      `${ms(state.cursor)}, ${held} microbatch${held === 1 ? "" : "es"} in flight`], event.clientX, event.clientY);
    redraw();
  });
  const fitNames = (names) => (names.length > 3 ? `${names[0]} and ${names.length - 1} like it` : names.join(", "));
  memoryCanvas.addEventListener("pointerleave", () => { tip.hidden = true; state.cursor = null; redraw(); });

  // ------------------------------------------------------------------------------- downloads
  function save(text, suffix) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = `${data.file_name}.${suffix}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  async function planText() {
    const element = byId("plan-data");
    if (element.type === "application/json") return element.textContent;
    const packed = unpack(element.textContent, Uint8Array);
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  // The same events as trace.py writes, from the same items.
  function traceText() {
    const events = [], us = (time) => Math.round(time * 1e6) / 1e3;
    const tracks = ["compute", "send activations", "receive gradients", "receive activations", "send gradients", "all-reduce"];
    const slice = (name, cat, pid, tid, from, to, args) => events.push({
      ph: "X", name, cat, pid, tid, ts: us(from), dur: Math.round((us(to) - us(from)) * 1e3) / 1e3, args });
    let position = 0;
    data.stages.forEach((stage, n) => {
      const has = [true, n < C, n < C, n > 0, n > 0, stage.devices.length > 1];
      for (const device of stage.devices) {
        events.push({ ph: "M", name: "process_name", pid: device.index, args: { name: `${device.name} (stage ${n})` } });
        events.push({ ph: "M", name: "process_sort_index", pid: device.index, args: { sort_index: position++ } });
        tracks.forEach((title, tid) => {
          if (!has[tid]) return;
          events.push({ ph: "M", name: "thread_name", pid: device.index, tid, args: { name: title } });
          events.push({ ph: "M", name: "thread_sort_index", pid: device.index, tid, args: { sort_index: tid } });
        });
      }
    });
    for (let i = 0; i < FIRST_TRANSFER; i++) {
      for (const device of data.stages[place[i]].devices) {
        slice(code(i), kind[i] === FORWARD ? "forward" : "backward", device.index, 0, start[i], start[i] + (end[i] - start[i]) * device.pace,
          { microbatch: microbatch[i], waited_for: waits[i] === NOTHING ? "nothing" : nameOf(waits[i]) });
      }
    }
    for (let i = FIRST_TRANSFER; i < FIRST_REDUCE; i++) {
      const there = kind[i] === FORWARD;
      (there ? [1, 3] : [2, 4]).forEach((tid, side) => {
        for (const device of data.stages[place[i] + side].devices) {
          slice(code(i), there ? "activations" : "gradients", device.index, tid, start[i], end[i],
            { microbatch: microbatch[i], waited_for: nameOf(waits[i]) });
        }
      });
    }
    data.stages.forEach((stage, n) => {
      if (stage.devices.length < 2) return;
      for (const device of stage.devices) {
        slice("all-reduce", "all-reduce", device.index, 5, start[FIRST_REDUCE + n], end[FIRST_REDUCE + n], { replicas: stage.devices.length });
      }
    });
    for (let m = 0; m < M; m++) {
      const steps = travel(m).filter(isBlock);
      steps.forEach((i, at) => {
        const device = data.stages[place[i]].devices[0];
        events.push({ ph: at === 0 ? "s" : at === steps.length - 1 ? "f" : "t", name: "microbatch", cat: "microbatch", id: m,
          pid: device.index, tid: 0, ts: us(start[i] + (end[i] - start[i]) * device.pace / 2), bp: "e" });
      });
    }
    data.stages.forEach((stage, n) => {
      const settled = [];
      const add = (time, held) => {
        if (settled.length && settled[settled.length - 1][0] === us(time)) settled.pop();
        settled.push([us(time), held]);
      };
      add(0, 0);
      for (let i = n * 2 * M; i < (n + 1) * 2 * M; i++) add(memoryTime(i), inFlight[i]);
      for (const device of stage.devices) {
        for (const [ts, held] of settled) {
          events.push({ ph: "C", name: "memory", pid: device.index, ts, args: { GB: device.base_gb + held * device.per_microbatch_gb } });
        }
      }
    });
    return JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" });
  }
  byId("download-plan").addEventListener("click", async () => save(await planText(), "plan"));
  byId("download-trace").addEventListener("click", () => save(traceText(), "trace"));

  // ----------------------------------------------------------------------------------- begin
  const restyle = () => { readColours(); resize(); };
  function print(on) {
    if (state.printing === on) return;
    state.printing = on;
    if (on) { state.from = 0; state.to = total || 1; state.cursor = null; tip.hidden = true; }
    restyle();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
  new ResizeObserver(() => { if (Math.max(view.clientWidth, 200) !== width) resize(); }).observe(view);
  byId("by-device").checked = state.byDevice;
  byId("by-device-label").hidden = numDevices === S;
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
})();
