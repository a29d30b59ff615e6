"""Planning with one stage a device and whole backwards: for tests that are about such plans."""

from functools import partial

from pipeplan.planning import door

ONE_STAGE = {"positions": 1, "split_backward": False}
plan = partial(door.plan, **ONE_STAGE)
make_problem = partial(door.make_problem, **ONE_STAGE)
