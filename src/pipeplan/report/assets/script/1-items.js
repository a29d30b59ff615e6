// The interactive half of the report. Times are milliseconds, sizes CSS pixels. The files of this folder are
// one script, joined in the order of their numbers. Text from the inputs only becomes textContent or canvas text.
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("timeline-data").textContent);

// The items: blocks group by group, transfers by channel and direction, one all-reduce a stage, numbered
// as in analysis/items.py. Mostly a group is a stage; a plan of the second version has `groups`, and `items`. A plan with too many items comes as a summary: then only the all-reduces are items.
function unpack(text, Kind) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Kind(bytes.buffer);
}
const M = data.microbatches, S = data.stages.length, C = S - 1, total = data.iteration_ms;
const summary = data.summary, given = data.items;
const groups = data.groups || data.stages.map((stage, n) => ({ stages: [n], devices: stage.devices }));
const G = groups.length, groupOf = [];
groups.forEach((group, g) => group.stages.forEach((n) => { groupOf[n] = g; }));
const noun = G < S ? "group" : "stage";
const FIRST_TRANSFER = given ? given.first_transfer : summary ? 0 : 2 * M * S;
const FIRST_REDUCE = given ? given.first_reduce : FIRST_TRANSFER + (summary ? 0 : 2 * M * C);
const ITEMS = given ? given.count : FIRST_REDUCE + S;
const FORWARD = 0, BACKWARD = 1, REDUCE = 2, INPUT = 3, WEIGHT = 4, NOTHING = -1;
const LETTERS = ["F", "B", "", "I", "W"];
const isBack = (i) => kind[i] === BACKWARD || kind[i] > REDUCE;
const start = new Float64Array(ITEMS), end = new Float64Array(ITEMS);
const kind = new Uint8Array(ITEMS), microbatch = new Int32Array(ITEMS), place = new Int32Array(ITEMS);
const waits = summary ? new Int32Array(ITEMS).fill(NOTHING) : unpack(data.waits, Int32Array);
const numberOf = new Int32Array(summary ? 0 : 4 * M * S).fill(NOTHING); // of blocks, then transfers, by kind, place
const slot = (isTransfer, direction, where, m) => ((isTransfer * 2 + direction) * S + where) * M + m;
const weightOf = new Map(); // the numbers of weight gradients, by stage and microbatch

function loadItems() {
  const blockStarts = unpack(data.block_start_ms, Float64Array), order = unpack(data.order, Int32Array);
  const sendStarts = unpack(data.transfer_start_ms, Float64Array), sent = unpack(data.sent, Int32Array);
  const sendEnds = data.sharing && unpack(data.sharing.transfer_end_ms, Float64Array);
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
    if (sendEnds) end[i] = sendEnds[i - FIRST_TRANSFER];
    else end[i] = start[i] + (kind[i] === FORWARD ? stage.send_ms : stage.return_ms);
    numberOf[slot(1, kind[i], place[i], microbatch[i])] = i;
  }
}
function loadGiven() {
  kind.set(unpack(given.kind, Uint8Array));
  place.set(unpack(given.place, Int32Array));
  microbatch.set(unpack(given.microbatch, Int32Array));
  start.set(unpack(given.start_ms, Float64Array));
  end.set(unpack(given.end_ms, Float64Array));
  for (let i = 0; i < FIRST_REDUCE; i++) {
    if (kind[i] === WEIGHT) weightOf.set(place[i] * M + microbatch[i], i);
    else numberOf[slot(i < FIRST_TRANSFER ? 0 : 1, kind[i] === FORWARD ? 0 : 1, place[i], microbatch[i])] = i;
  }
}
function loadAllReduces() {
  for (let n = 0; n < S; n++) {
    const i = FIRST_REDUCE + n;
    [start[i], end[i]] = data.stages[n].all_reduce;
    kind[i] = REDUCE;
    place[i] = n;
    microbatch[i] = -1;
  }
}
if (given) loadGiven();
else {
  if (!summary) loadItems();
  loadAllReduces();
}
// The all-reduces of a group, or their parts, as they run.
const reducesOf = (g) => (given ? given.reduces[g] : groups[g].stages.map((n) => FIRST_REDUCE + n));

// How long a lane was busy, and with backwards, up to each item: the density of what is too small.
const busyBefore = new Float64Array(ITEMS + 1), backBefore = new Float64Array(ITEMS + 1);
for (let i = 0; i < ITEMS; i++) {
  busyBefore[i + 1] = busyBefore[i] + end[i] - start[i];
  backBefore[i + 1] = backBefore[i] + (isBack(i) ? end[i] - start[i] : 0);
}
// Which transfers are slowed, because another one uses the same link: by number what, where, how much.
const slowed = new Map();
if (data.sharing) {
  const by = unpack(data.sharing.by, Int32Array), on = unpack(data.sharing.on, Int32Array);
  const more = unpack(data.sharing.more_ms, Float64Array);
  unpack(data.sharing.slowed, Int32Array).forEach((i, k) => slowed.set(i, { by: by[k], link: data.sharing.links[on[k]], more: more[k] }));
}
const critical = [];
for (let i = summary ? NOTHING : data.last; i !== NOTHING; i = waits[i]) critical.push(i);
critical.reverse();

const isBlock = (i) => i < FIRST_TRANSFER;
const isTransfer = (i) => i >= FIRST_TRANSFER && i < FIRST_REDUCE;
const code = (i) => LETTERS[kind[i]] + microbatch[i];
// With its stage where the lane has several.
const longCode = (i) => (groups[groupOf[place[i]]].stages.length > 1 ? place[i] : "") + code(i);
function nameOf(i) {
  if (i === NOTHING) return "the start";
  if (kind[i] === REDUCE) {
    const parts = given ? given.first_part[place[i] + 1] - given.first_part[place[i]] : 1;
    return `all-reduce of stage ${place[i]}${parts > 1 ? `, part ${i - given.first_part[place[i]] + 1}` : ""}`;
  }
  if (isBlock(i)) return `${code(i)} on stage ${place[i]}`;
  const ends = kind[i] === FORWARD ? [place[i], place[i] + 1] : [place[i] + 1, place[i]];
  return `transfer of ${code(i)} from stage ${ends[0]} to ${ends[1]}`;
}
// A name from the inputs as one short line: without characters that control how text is written.
function shown(name) {
  const plain = name.slice(0, 240).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "?");
  return plain.length > 60 ? plain.slice(0, 59) + "…" : plain;
}
function ms(value) {
  const size = Math.abs(value);
  return (size >= 1000 ? value.toFixed(1) : size >= 10 ? value.toFixed(2) : value.toFixed(3)) + " ms";
}
