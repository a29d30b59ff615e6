// The plan and its trace as files.
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
// The same events as trace.py writes, from the same items; times in whole nanoseconds.
const us = (time) => Math.round(time * 1e6) / 1e3;
const TRACKS = ["compute", "send activations", "receive gradients", "receive activations", "send gradients", "all-reduce"];
function makeSlice(name, cat, pid, tid, from, to, args) {
  return { ph: "X", name, cat, pid, tid, ts: us(from), dur: Math.round((us(to) - us(from)) * 1e3) / 1e3, args };
}
function* nameEvents() {
  let position = 0;
  for (const [n, stage] of data.stages.entries()) {
    const has = [true, n < C, n < C, n > 0, n > 0, stage.devices.length > 1];
    for (const device of stage.devices) {
      yield { ph: "M", name: "process_name", pid: device.index, args: { name: `${device.name} (stage ${n})` } };
      yield { ph: "M", name: "process_sort_index", pid: device.index, args: { sort_index: position++ } };
      for (const [tid, title] of TRACKS.entries()) {
        if (!has[tid]) continue;
        yield { ph: "M", name: "thread_name", pid: device.index, tid, args: { name: title } };
        yield { ph: "M", name: "thread_sort_index", pid: device.index, tid, args: { sort_index: tid } };
      }
    }
  }
}
function slowedArgs(i) {
  const found = slowed.get(i);
  return found ? { slowed_by: nameOf(found.by), slowed_on: found.link, slowed_ms: found.more } : {};
}
function* sliceEvents() {
  for (let i = 0; i < FIRST_TRANSFER; i++) {
    const args = { microbatch: microbatch[i], waited_for: waits[i] === NOTHING ? "nothing" : nameOf(waits[i]), ...slowedArgs(waits[i]) };
    for (const device of data.stages[place[i]].devices) {
      const until = start[i] + (end[i] - start[i]) * device.pace;
      yield makeSlice(code(i), kind[i] === FORWARD ? "forward" : "backward", device.index, 0, start[i], until, args);
    }
  }
  for (let i = FIRST_TRANSFER; i < FIRST_REDUCE; i++) {
    const there = kind[i] === FORWARD, args = { microbatch: microbatch[i], waited_for: nameOf(waits[i]), ...slowedArgs(i) };
    for (const [side, tid] of (there ? [1, 3] : [2, 4]).entries()) {
      for (const device of data.stages[place[i] + side].devices) {
        yield makeSlice(code(i), there ? "activations" : "gradients", device.index, tid, start[i], end[i], args);
      }
    }
  }
  for (const [n, stage] of data.stages.entries()) {
    if (stage.devices.length < 2) continue;
    const i = FIRST_REDUCE + n, args = { replicas: stage.devices.length, ...slowedArgs(i) };
    for (const device of stage.devices) yield makeSlice("all-reduce", "all-reduce", device.index, 5, start[i], end[i], args);
  }
}
function* flowEvents() {
  for (let m = 0; m < M; m++) {
    const steps = travel(m).filter(isBlock);
    for (const [at, i] of steps.entries()) {
      const device = data.stages[place[i]].devices[0], ph = at === 0 ? "s" : at === steps.length - 1 ? "f" : "t";
      const middle = us(start[i] + (end[i] - start[i]) * device.pace / 2);
      yield { ph, name: "microbatch", cat: "microbatch", id: m, pid: device.index, tid: 0, ts: middle, bp: "e" };
    }
  }
}
function* memoryEvents() {
  for (const [n, stage] of data.stages.entries()) {
    const settled = [[0, 0]];
    for (let i = n * STEPS; i < (n + 1) * STEPS; i++) {
      const at = us(memoryTime(i));
      if (settled[settled.length - 1][0] === at) settled.pop(); // of several changes at one instant the last
      settled.push([at, inFlight[i]]);
    }
    for (const device of stage.devices) {
      for (const [ts, held] of settled) {
        yield { ph: "C", name: "memory", pid: device.index, ts, args: { GB: device.base_gb + held * device.per_microbatch_gb } };
      }
    }
  }
}
function* linkEvents() {
  const links = data.sharing ? data.sharing.busiest : [];
  if (!links.length) return;
  const pid = data.sharing.cluster_devices;
  yield { ph: "M", name: "process_name", pid, args: { name: "shared links" } };
  yield { ph: "M", name: "process_sort_index", pid, args: { sort_index: pid } };
  for (const link of links) {
    const used = unpack(link.used, Float64Array);
    for (const [k, time] of unpack(link.times_ms, Float64Array).entries()) {
      yield { ph: "C", name: link.name, pid, ts: us(time), args: { "GB/s": used[k] * link.gb_per_s } };
    }
  }
}
function traceText() {
  const events = [...nameEvents(), ...sliceEvents(), ...flowEvents(), ...memoryEvents(), ...linkEvents()];
  return JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" });
}
byId("download-plan").addEventListener("click", async () => save(await planText(), "plan"));
byId("download-trace").addEventListener("click", () => save(traceText(), "trace"));

