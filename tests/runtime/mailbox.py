"""Transports inside one process: what is sent waits in a mailbox until somebody receives it."""

from collections import defaultdict, deque

import torch

from pipeplan.runtime.exchange.transports import Transport
from pipeplan.runtime.streams import HostStreams


class Work:
    def __init__(self, finish=lambda: None):
        self._finish = finish
        self.is_done = False

    def wait(self):
        if not self.is_done:
            self._finish()
            self.is_done = True

    def is_completed(self):
        return self.is_done


class Mailbox:
    """Messages by sender, receiver and tag; stricter than gloo: sizes have to be equal."""

    def __init__(self):
        self.boxes = defaultdict(deque)
        self.num_sent = 0

    def put(self, key, tensor):
        self.num_sent += 1
        self.boxes[key].append(tensor.detach().clone())

    def get(self, key, tensor):
        assert self.boxes[key], f"nothing was sent to {key}"
        sent = self.boxes[key].popleft()
        assert sent.shape == tensor.shape, f"{key}: {sent.shape} into {tensor.shape}"
        assert sent.dtype == tensor.dtype, f"{key}: {sent.dtype} into {tensor.dtype}"
        with torch.no_grad():
            tensor.copy_(sent)

    def is_empty(self):
        return not any(self.boxes.values())


class MailTransport(Transport):
    """One rank's end; `posts_ahead=False` matches tensors by order alone, as NCCL does."""

    def __init__(self, mailbox, rank, *, posts_ahead=True):
        super().__init__(HostStreams())
        self.mailbox, self.rank, self.posts_ahead = mailbox, rank, posts_ahead

    def _key(self, source, target, tag, channel, kind):
        if self.posts_ahead:
            return (source, target, "tag", tag)
        return (source, target, "order", channel, kind)

    def send(self, tensor, rank, tag, channel, kind):
        self.mailbox.put(self._key(self.rank, rank, tag, channel, kind), tensor)
        return Work()

    def receive(self, tensor, rank, tag, channel, kind):
        key = self._key(rank, self.rank, tag, channel, kind)
        if not self.posts_ahead:
            # A receive takes the oldest message that no receive was posted for.
            self.mailbox.get(key, tensor)
            return Work()
        return Work(lambda: self.mailbox.get(key, tensor))

    def send_header(self, header, rank, tag):
        self.mailbox.put((self.rank, rank, "tag", tag), header)
        return Work()

    def receive_header(self, header, rank, tag):
        return Work(lambda: self.mailbox.get((rank, self.rank, "tag", tag), header))
