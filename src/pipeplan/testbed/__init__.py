"""Predicted against measured, on a cluster emulated on this machine.

::

    scaling        the same plan, with times and bytes that this machine can carry
    topology       ranks, rates and shared links of the emulated network
    shaping        the network as commands of ip and tc
    system_calls   what Python does not offer: namespaces, signals of dying parents
    abilities      which way works here: namespaces, or pacing
    pacing         the way without privileges: limits on gloo's own sockets
    stand_in       a model whose layers only have the right sizes
    paced          the runtime with blocks as long as the profile says
    rank           what one emulated device does
    nursery        the process that has torch, and forks ranks
    door           a plan in, a measurement out
    measurement    what was measured, and where it parts from the prediction
    showing        terminal, page and trace of a measurement

The runtime is that of real training (`pipeplan.runtime`). Only computation is replaced, or padded.
Namespaces have no names: each belongs to its process, and vanishes with it, however it ends.
"""
