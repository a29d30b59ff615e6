"""Moves tensors between neighbouring stages: routing of rows, channels, pending sends, transports.

::

    row_routing   which rows go to which rank
    transports    send and receive one tensor, over gloo or NCCL
    sends         keep tensors until they are sent
    channels      one direction of one channel, during one step
    neighbours    all channels of one rank
"""
