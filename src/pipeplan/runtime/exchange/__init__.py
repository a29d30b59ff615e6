"""Moves tensors between neighbouring stages: routing of rows, channels, pending sends, transports.

::

    row_routing   which rows go to which rank
    transports    send and receive one tensor, over gloo or NCCL
    sends         keep tensors until they are sent
    contents      what a message carries, and its header
    forecasts     what the next message probably carries
    packing       small messages in one piece
    joining       one message out of those of several replicas
    channels      one direction of one channel, during one step
    neighbours    all channels of one rank
    rank_tree     a few numbers to and from all ranks
"""
