"""A third replay of plans on shared links, as naive as the rules of `docs/formats.md` read.

One object for each pair of devices, every rate found anew at every instant, every number taken from
the fields of model, cluster and plan. It shares nothing with the simulator and nothing with the
checker's replay: neither costs nor groups of equal flows, neither the members of links nor rings.
"""

from dataclasses import dataclass, field

from pipeplan.pipeline import Plan

INSTANT_MS = 1e-9
BYTES_PER_MS = 1e6  # in a GB/s
NEVER = float("inf")


@dataclass(eq=False)
class Flow:
    """From one device to another (rules 8 and 9)."""

    task: "Task"
    sender: int
    receiver: int
    start_ms: float
    left_bytes: float
    limit: float
    has_started: bool = False
    has_ended: bool = False
    rate: float = 0.0


@dataclass(eq=False)
class Task:
    """A transfer, or an all-reduce: `place` is its channel or its stage."""

    place: int
    kind: str
    microbatch: int
    num_open: int = 0


@dataclass(eq=False)
class Judge:
    """Sees every sharing of links; tests replace it."""

    seen: int = 0

    def __call__(self, replay: "NaiveReplay") -> None:
        """All flows under way have their rates."""
        self.seen += 1


@dataclass(eq=False)
class NaiveReplay:
    """One iteration of a plan; `run` fills `block_ends` and `ring_ends`."""

    plan: Plan
    judge: Judge = field(default_factory=Judge)

    def __post_init__(self) -> None:
        plan = self.plan
        self.num_stages = len(plan.stages)
        self.orders = [
            [(str(block.kind), block.microbatch) for block in order]
            for order in plan.schedule.orders
        ]
        self.links = self.all_links()
        self.now_ms = 0.0
        self.flows: list[Flow] = []
        self.block_end_ms = [NEVER] * self.num_stages  # of the block that runs
        self.position = [0] * self.num_stages
        self.there = [set() for _ in plan.stages]
        self.there[0] = {("F", m) for m in range(plan.microbatches)}
        self.queues = [{"F": [], "B": []} for _ in range(self.num_stages - 1)]
        self.sending = [{"F": None, "B": None} for _ in range(self.num_stages - 1)]
        self.begun = [{"F": 0, "B": 0} for _ in range(self.num_stages - 1)]
        self.block_ends = [[] for _ in plan.stages]
        self.ring_ends = [NEVER] * self.num_stages

    # ------------------------------------------------------------------ the cluster's fields

    def all_links(self) -> list[tuple[set[int], float, float]]:
        """Members, what they can send, what they can receive."""
        cluster = self.plan.cluster
        hosts = {}
        for number, device in enumerate(cluster.devices):
            hosts.setdefault(device.host, set()).add(number)
        uplinks = cluster.uplink_gb_per_s
        if uplinks is None:
            uplinks = {}
        if not isinstance(uplinks, dict):
            uplinks = dict.fromkeys(hosts, uplinks)
        links = [(hosts[host], rate, rate) for host, rate in uplinks.items()]
        for link in cluster.shared:
            members = set()
            for name in link.members:
                members |= hosts.get(name, set())
                members |= {n for n, device in enumerate(cluster.devices) if device.name == name}
            inward = link.gb_per_s if link.in_gb_per_s is None else link.in_gb_per_s
            links.append((members, link.gb_per_s, inward))
        return [(members, out * BYTES_PER_MS, into * BYTES_PER_MS) for members, out, into in links]

    def sides(self, flow: Flow) -> list[tuple[int, str]]:
        """Rule 10: outward where the sender is a member, inward where the receiver is."""
        used = []
        for number, (members, _, _) in enumerate(self.links):
            if flow.sender in members and flow.receiver not in members:
                used.append((number, "out"))
            if flow.receiver in members and flow.sender not in members:
                used.append((number, "in"))
        return used

    def capacity(self, side: tuple[int, str]) -> float:
        _, out, into = self.links[side[0]]
        return out if side[1] == "out" else into

    def rate(self, u: int, v: int) -> float:
        return self.plan.cluster.bandwidth_gb_per_s[u][v] * BYTES_PER_MS

    def latency_ms(self, u: int, v: int) -> float:
        latency_us = self.plan.cluster.latency_us
        return (latency_us[u][v] if hasattr(latency_us, "__len__") else latency_us) / 1000

    def shares(self, stage: int) -> list[tuple[int, float]]:
        devices, shares = self.plan.stages[stage].devices, self.plan.stages[stage].shares
        even = [1 / len(devices)] * len(devices)
        return list(zip(devices, shares or even, strict=True))

    def block_ms(self, stage: int, kind: str) -> float:
        """Rule 1."""
        placed = self.plan.stages[stage]
        layers = [self.plan.model.layers[n] for n in placed.layers]
        work_ms = sum(layer.backward_ms if kind == "B" else layer.forward_ms for layer in layers)
        if kind == "B" and placed.recompute:
            work_ms += sum(layer.forward_ms for layer in layers)
        devices = self.plan.cluster.devices
        return work_ms * max(share / devices[u].speed for u, share in self.shares(stage))

    # ------------------------------------------------------------------ what begins

    def add_flow(self, task: Task, pair: tuple[int, int], start_ms: float, num_bytes, limit):
        self.flows.append(Flow(task, *pair, start_ms, num_bytes, limit))
        task.num_open += 1

    def begin_transfer(self, channel: int, kind: str) -> None:
        microbatch = self.queues[channel][kind].pop(0)
        task = Task(channel, kind, microbatch)
        self.sending[channel][kind] = task
        self.begun[channel][kind] += 1
        sender, receiver = (channel, channel + 1) if kind == "F" else (channel + 1, channel)
        layer = self.plan.model.layers[self.plan.stages[channel].layers[-1]]
        num_bytes = layer.output_bytes if kind == "F" else layer.gradient_bytes
        for u, x in self.shares(sender):
            for v, y in self.shares(receiver):
                start_ms = self.now_ms + self.latency_ms(u, v)
                self.add_flow(task, (u, v), start_ms, x * y * num_bytes, self.rate(u, v))

    def begin_ring(self, stage: int) -> None:
        """Rules 3, 8, 9: the cluster's order, but the devices of a host together."""
        devices = sorted(self.plan.stages[stage].devices)
        k = len(devices)
        if k == 1:
            self.ring_ends[stage] = self.now_ms
            return
        host_of = [device.host for device in self.plan.cluster.devices]
        ring = []
        for first in devices:
            ring += [u for u in devices if host_of[u] == host_of[first] and u not in ring]
        layers = self.plan.stages[stage].layers
        num_bytes = sum(self.plan.model.layers[n].parameter_bytes for n in layers)
        num_bytes *= 2 * (k - 1) / k
        pairs = [(u, v) for u in devices for v in devices if u != v]
        limit = min(self.rate(*pair) for pair in pairs)
        start_ms = self.now_ms + 2 * (k - 1) * max(self.latency_ms(*pair) for pair in pairs)
        task = Task(stage, "ring", 0)
        for i in range(k):
            self.add_flow(task, (ring[i], ring[(i + 1) % k]), start_ms, num_bytes, limit)

    # ------------------------------------------------------------------ an instant

    def run(self) -> "NaiveReplay":
        self.start_stages()
        while (next_ms := self.next_ms()) < NEVER:
            for flow in self.under_way():
                flow.left_bytes -= flow.rate * (next_ms - self.now_ms)
            self.now_ms = next_ms
            while self.next_ms() <= self.now_ms + INSTANT_MS:
                self.take_ends(self.now_ms + INSTANT_MS)
                for channel in range(self.num_stages - 1):
                    self.serve(channel)
                self.start_stages()
            self.share()
        assert all(len(ends) == 2 * self.plan.microbatches for ends in self.block_ends), "deadlock"
        return self

    def under_way(self) -> list[Flow]:
        return [flow for flow in self.flows if flow.has_started and not flow.has_ended]

    def end_ms(self, flow: Flow) -> float:
        return self.now_ms + max(0.0, flow.left_bytes) / flow.rate if flow.rate else NEVER

    def next_ms(self) -> float:
        times = [*self.block_end_ms, *map(self.end_ms, self.under_way())]
        times += [flow.start_ms for flow in self.flows if not flow.has_started]
        return min(times)

    def take_ends(self, last_ms: float) -> None:
        for stage in range(self.num_stages):
            if self.block_end_ms[stage] <= last_ms:
                self.end_block(stage)
        for flow in self.flows:
            if flow.has_started and self.end_ms(flow) <= last_ms:
                flow.has_ended = True
            elif not flow.has_started and flow.start_ms <= last_ms:
                flow.has_started = True
                flow.has_ended = flow.left_bytes == 0
            if flow.has_ended:
                flow.task.num_open -= 1
                if flow.task.num_open == 0:
                    self.end_task(flow.task)
        self.flows = [flow for flow in self.flows if not flow.has_ended]

    def end_block(self, stage: int) -> None:
        kind, microbatch = self.orders[stage][self.position[stage]]
        self.block_ends[stage].append(self.block_end_ms[stage])
        self.block_end_ms[stage] = NEVER
        self.position[stage] += 1
        if kind == "F" and stage == self.num_stages - 1:
            self.there[stage].add(("B", microbatch))
        elif kind == "F":
            self.queues[stage]["F"].append(microbatch)
        elif stage > 0:
            self.queues[stage - 1]["B"].append(microbatch)
        if self.position[stage] == len(self.orders[stage]):
            self.begin_ring(stage)

    def end_task(self, task: Task) -> None:
        if task.kind == "ring":
            self.ring_ends[task.place] = self.now_ms
            return
        self.sending[task.place][task.kind] = None
        receiver = task.place + 1 if task.kind == "F" else task.place
        self.there[receiver].add((task.kind, task.microbatch))

    def serve(self, channel: int) -> None:
        """Rule 4."""
        waits = {kind for kind in "FB" if self.queues[channel][kind]}
        busy = {kind for kind in "FB" if self.sending[channel][kind]}
        if str(self.plan.cluster.duplex) == "half":
            if busy:
                return
            if len(waits) == 2:
                i, j = self.begun[channel]["B"], self.begun[channel]["F"]
                first = i + 4 * (self.num_stages - 1) - 2 * channel - 1 <= j + 2 * channel + 1
                waits = {"B"} if first else {"F"}
        for kind in sorted(waits - busy):
            self.begin_transfer(channel, kind)

    def start_stages(self) -> None:
        for stage, order in enumerate(self.orders):
            is_free = self.block_end_ms[stage] == NEVER and self.position[stage] < len(order)
            if is_free and order[self.position[stage]] in self.there[stage]:
                kind, _ = order[self.position[stage]]
                self.block_end_ms[stage] = self.now_ms + self.block_ms(stage, kind)

    def share(self) -> None:
        """Rule 10: all rates grow alike from 0 until a limit is met or a link is full."""
        growing = self.under_way()
        sides = {id(flow): self.sides(flow) for flow in growing}
        left = {side: self.capacity(side) for used in sides.values() for side in used}
        level = 0.0
        while growing:
            users = dict.fromkeys(left, 0)
            for flow in growing:
                for side in sides[id(flow)]:
                    users[side] += 1
            room = {side: left[side] / users[side] for side in left if users[side]}
            rise = min([flow.limit - level for flow in growing] + list(room.values()))
            level += rise
            for side in left:
                left[side] -= rise * users[side]
            full = {side for side, each in room.items() if each <= rise * (1 + 1e-12)}
            for flow in list(growing):
                is_full = any(side in full for side in sides[id(flow)])
                if is_full or level >= flow.limit * (1 - 1e-14):
                    flow.rate = level
                    growing.remove(flow)
        self.judge(self)
