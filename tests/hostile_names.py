"""Thirty names that attack whatever shows them, and plans in which everything has such a name."""

from pipeplan.cluster import Cluster, Device
from pipeplan.pipeline import Block, Kind, Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile

NAMES = {
    "script": "<script>window.hacked=1</script>",
    "end of script": "</script><script>window.hacked=1</script>",
    "end of script in capitals": "</SCRIPT ><SCRIPT>window.hacked=1</SCRIPT>",
    "comment": "<!--<script>",
    "end of comment": "--><script>window.hacked=1</script>",
    "end of data": "]]><script>window.hacked=1</script>",
    "image": '<img src=x onerror="window.hacked=1">',
    "picture": "<svg/onload=window.hacked=1>",
    "foreign object": "<foreignObject><body onload=window.hacked=1></foreignObject>",
    "link": '<a href="javascript:window.hacked=1">x</a>',
    "style": "</style><style>*{display:none}</style>",
    "end of title": "</title><script>window.hacked=1</script>",
    "end of text": "</text></svg><script>window.hacked=1</script>",
    "double quote": '" onmouseover="window.hacked=1',
    "single quote": "' onmouseover='window.hacked=1",
    "backquote": "`${window.hacked=1}`",
    "placeholder": "{{ 7 * 7 }}{% raw %}{{plan}}${7*7}",
    "entities": "&lt;b&gt; &amp; &#60;script&#62;",
    "escaped in JSON": "\\u003c/script\\u003e\\",
    "escape sequences": "\x1b[31m\x1b]0;title\x07\x9b2J",
    "null and controls": "a\x00b\x01c\x7fd",
    "line ends": "a\nb\rc\u2028d\u2029e\x85f",
    "tabs and blanks": "\t  a \t b  ",
    "right to left": "\u202egnp.exe\u200f\u2066x\u2069",
    "invisible": "\u200b\u200d\ufeff\u2060",
    "long": "x" * 10_000,
    "long and hostile": "<b>" * 4_000,
    "formula": '=HYPERLINK("http://x","y")',
    "command formula": "@SUM(1+1)*cmd|' /C calc'!A0",
    "other scripts": "名前 \U0001f600 e\u0301 ﷽",
}


def hostile_plan(name: str) -> Plan:
    """Two stages, the first with two replicas; every name in it is, or begins with, this one."""
    layers = tuple(
        LayerProfile(
            name=f"{name}{n}",
            forward_ms=1,
            backward_ms=2,
            output_bytes=1e6,
            parameter_bytes=1e6,
        )
        for n in range(2)
    )
    orders = [[Block(Kind(letter), n, 0) for letter in "FB"] for n in range(2)]
    return Plan(
        model=ModelProfile(name=name, microbatch_size=1, layers=layers),
        cluster=Cluster(
            name=name,
            devices=tuple(Device(name=f"{name}{n}", host=f"{name}h{n // 2}") for n in range(3)),
            bandwidth_gb_per_s=((1.0,) * 3,) * 3,
        ),
        microbatches=1,
        stages=(
            Stage(layers=range(1), devices=(0, 1)),
            Stage(layers=range(1, 2), devices=(2,)),
        ),
        schedule=Schedule(tuple(map(tuple, orders))),
        planner=name,
        options={name: name},
        version=name,
    )
