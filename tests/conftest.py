"""What all tests need."""

import signal

# A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C.
# Tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
