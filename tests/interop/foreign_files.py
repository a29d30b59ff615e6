"""Small files in the formats of other programs, written for these tests."""

import json

PIPEDREAM = (
    "node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000,"
    " activation_size=0.0, parameter_size=0.000\n"
    "node4 -- Embedding(320, 16, padding_idx=0) -- forward_compute_time=0.073,"
    " backward_compute_time=6.949, activation_size=6291456.0, parameter_size=132382720.000\n"
    "node2 -- Input1 -- forward_compute_time=3.400, backward_compute_time=0.000,"
    " activation_size=64.0, parameter_size=0.000\n"
    "node5 -- LSTM(16, 16) -- forward_compute_time=2.491, backward_compute_time=4.203,"
    " activation_size=[6291456.0; 131072.0; 131072.0], parameter_size=33587200.000\n"
    "node6 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000,"
    " activation_size=6291456.0, parameter_size=0.000\n"
    "node7 -- LSTM(16, 16) -- forward_compute_time=2.492, backward_compute_time=4.201,"
    " activation_size=[6291456.0; 131072.0; 131072.0], parameter_size=33587200.000 -- stage_id=1\n"
    "node8 -- Add -- forward_compute_time=0.010, backward_compute_time=0.020,"
    " activation_size=6291456.0, parameter_size=0.000\n"
    "\tnode1 -- node4\n"
    "\tnode4 -- node5\n"
    "\tnode2 -- node5\n"
    "\tnode5 -- node6\n"
    " \tnode6 -- node7\n"
    "\tnode7 -- node8\n"
    "\tnode6 -- node8\n"
    "\tnode4 -- node8\n"
)
DAPPLE = (
    "node1 -- Input -- forward_compute_time=3.4, backward_compute_time=0.000,"
    " activation_size=[602112; 4004], parameter_size=0\n"
    "node2 -- Conv2d_1_1 -- forward_compute_time=3.4, backward_compute_time=6.8,"
    " activation_size=384000000.000, parameter_size=6835.000\n"
    "node3 -- FC1 -- forward_compute_time=0.45, backward_compute_time=0.9,"
    " activation_size=500000.000, parameter_size=392015625.000\n"
    "\tnode1 -- node2\n"
    " \tnode2 -- node3\n"
)


def _way(seconds: float, parameters: float, activations: float) -> dict:
    return {
        "id": "vanilla",
        "timePerSample": seconds,
        "parameterSize": parameters,
        "memoryUsageA": activations,
        "memoryUsageB": 2 * parameters,
        "syncTimeFw": {},
        "syncTimeBw": {},
    }


def _node(identity: int, name: str, *costs: float) -> dict:
    recomputing = _way(2 * costs[0], *costs[1:])
    ways = {"1": [_way(*costs), recomputing], "2": [_way(costs[0] / 2, costs[1] / 2, costs[2])]}
    return {"id": identity, "name": name, "TMPCs": ways}


PIPER_COSTS = (
    ("tensor", 0.0, 0.0, 8192.0),
    ("Embedding", 0.001116, 200824320.0, 1982464.0),
    ("tensor", 0.0, 0.0, 8192.0),
    ("ParallelTransformerLayer", 0.030492, 176997120.0, 606478336.0),
    ("ParallelTransformerLayer", 0.0304919, 176997120.0, 606478336.0),
)
PIPER = json.dumps(
    {
        "maxDevices": 10,
        "maxMemoryPerDevice": 80e9,
        "bandwidth": 25e9,
        "mbsInBatch": 1920,
        "nodes": [_node(10 + i, *costs) for i, costs in enumerate(PIPER_COSTS)],
        "edges": [
            {"sourceId": 10, "destId": 11, "communicationCost": 8192.0},
            {"sourceId": 11, "destId": 13, "communicationCost": 31457280.0},
            {"sourceId": 12, "destId": 13, "communicationCost": 8192.0},
            {"sourceId": 12, "destId": 14, "communicationCost": 4096.0},
            {"sourceId": 13, "destId": 14, "communicationCost": 31457280.0},
        ],
    }
)
LAYERS_CSV = """name,forward_ms,backward_ms,output_bytes,parameter_bytes,activation_bytes
embed,0.4,0.8,4194304,131072000,8388608
"block, first",1.25,2.5,4194304,50331648,
head,0.7,1.4,0,131072000,1
"""
NVIDIA_TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV2\tPIX\tSYS\tPXB\t0-31\t0\t\tN/A\n"
    "GPU1\tNV2\t X \tPHB\tSYS\tPXB\t0-31\t0\t\tN/A\n"
    "GPU2\tPIX\tPHB\t X \tNODE\tSYS\t32-63\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNODE\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
NCCL = """<system version="1">
  <cpu numaid="0" affinity="00000000,0000ffff" arch="x86_64">
    <pci busid="0000:16:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1">
          <nvlink target="0000:19:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:19:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="8">
        <gpu dev="1" sm="80" rank="1" gdr="1">
          <nvlink target="0000:18:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:20:00.0" class="0x020000" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000" port="1"/></nic>
      </pci>
    </pci>
    <pci busid="0000:30:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="2" sm="80" rank="2" gdr="1"/>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="ffff0000,00000000" arch="x86_64">
    <pci busid="0000:40:00.0" class="0x030200" link_speed="" link_width="0">
      <gpu dev="3" sm="80" rank="3" gdr="1"/>
    </pci>
  </cpu>
</system>
"""
NCCL_SWITCHED = """<system version="1"><cpu numaid="0">
  <pci busid="0000:01:00.0" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90">
    <nvlink target="0000:d0:00.0" count="10" tclass="0x068000"/>
    <nvlink target="0000:d1:00.0" count="8" tclass="0x068000"/></gpu></pci>
  <pci busid="0000:02:00.0" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="1" sm="90">
    <nvlink target="0000:d0:00.0" count="18" tclass="0x068000"/></gpu></pci>
  <pci busid="0000:03:00.0" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="2" sm="90">
    <nvlink target="0000:d0:00.0" count="18" tclass="0x068000"/></gpu></pci>
</cpu></system>
"""
MATRIX_CSV = """device;host;memory_gb;speed;a;b;c
a;h0;16;1;;12;1.25
b;h0;16;1;12;;1.25
c;h1;32;2;1.5;0;
"""


def _operator(name: str, ts: float, dur: float, **arguments: object) -> dict:
    fields = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur}
    return {**fields, "args": {key.replace("_", " "): v for key, v in arguments.items()}}


def _annotation(name: str, ts: float, dur: float) -> dict:
    fields = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7}
    return {**fields, "ts": ts, "dur": dur, "args": {}}


def _backward(name: str, ts: float, dur: float, sequence: int, dims: list[int]) -> list[dict]:
    shapes = {"Input_Dims": [dims], "Input_type": ["float"], "Sequence_number": sequence}
    return [
        _operator(f"autograd::engine::evaluate_function: {name}", ts, dur, **shapes),
        _operator(name, ts + 0.5, dur - 1, **shapes),
    ]


def _accumulation(ts: float, dims: list[int]) -> list[dict]:
    shapes = {"Input_Dims": [dims], "Input_type": ["float"]}
    engine = "autograd::engine::evaluate_function: "
    return [
        _operator(f"{engine}torch::autograd::AccumulateGrad", ts, 2, **shapes),
        _operator("torch::autograd::AccumulateGrad", ts + 0.5, 1, **shapes),
    ]


def trace(num_steps: int = 2) -> dict:
    """Two annotated layers; each step takes 1000 us.

    ::

        layer a   0..100: an operator of 40 us with an inner one   behind it: 5 us
        layer b   200..300: an operator of 60 us                   behind it: the loss, 10 us
        backward  400: loss 20 us, b 120 us + 2, a 80 us + 2       optimizer: 900 us
    """
    events: list[dict] = [{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "x"}}]
    for step in range(num_steps):
        t, first = 1000.0 * step, 3 * step
        events += [
            _annotation("a", t, 100),
            _operator("aten::linear", t + 10, 40, Sequence_number=first),
            _operator("aten::addmm", t + 20, 20, Sequence_number=first),
            _operator("aten::detach", t + 110, 5),
            _annotation("b", t + 200, 100),
            _operator("aten::linear", t + 210, 60, Sequence_number=first + 1),
            _operator("aten::sum", t + 310, 10, Sequence_number=first + 2),
            *_backward("SumBackward0", t + 400, 20, first + 2, [1]),
            *_backward("AddmmBackward0", t + 430, 120, first + 1, [4, 10]),
            *_accumulation(t + 560, [10, 8]),
            *_backward("AddmmBackward0", t + 600, 80, first, [4, 8]),
            *_accumulation(t + 690, [8, 3]),
            _annotation("Optimizer.step#SGD.step", t + 700, 250),
            _operator("aten::add_", t + 710, 200),
        ]
    return {"schemaVersion": 1, "traceEvents": events}


TRACE = json.dumps(trace())
SAMPLES = {
    "pipedream": PIPEDREAM,
    "dapple": DAPPLE,
    "piper": PIPER,
    "torch-trace": TRACE,
    "layers-csv": LAYERS_CSV,
    "nvidia-topo": NVIDIA_TOPO,
    "nccl": NCCL,
    "matrix-csv": MATRIX_CSV,
}
