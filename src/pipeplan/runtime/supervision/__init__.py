"""Starts ranks together and ends them together, with one line that says why.

::

    launching      join the ranks that torchrun starts
    processes      is a process alive, and is it the same one?
    termination    notice SIGTERM at once
    status_board   what ranks tell each other through the store
    watchdog       find a rank that fails, and end all ranks
    error_policy   which rank is to blame for an error
"""
