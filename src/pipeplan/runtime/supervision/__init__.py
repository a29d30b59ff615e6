"""Starts ranks together and ends them together, with one line that says why.

::

    options         how patient ranks are
    processes       is a process alive, is it the same one, and is it ours?
    patient_clock   a time that leaves out what a busy machine takes
    launch_secret   what ranks know and strangers do not
    signed_store    writes and reads what only ranks can have written
    status_board    what ranks tell each other through the store
    courier         talks with the store, which may not answer
    crew            this rank, the others, and how it talks with them

    store_holder    who is to blame if the store does not answer
    local_watch     the processes of this host
    driver          where the main thread is
    activity        what the main thread does
    judging         who is to blame, or waited for
    signs           the signs of life that a rank reads
    termination     notice SIGTERM at once
    ending          one line, and the end of all ranks
    watching        the thread that finds a rank that fails
    watchdog        what the main thread tells that thread

    connections     errors that other ranks have caused
    error_policy    which rank is to blame for an error
    gathering       waits until all ranks have come
    meeting         ranks gather, and watch over each other from then on
    launching       join the ranks that torchrun starts
"""
