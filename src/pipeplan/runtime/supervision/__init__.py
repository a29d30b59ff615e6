"""Starts ranks together and ends them together, with one line that says why.

::

    options         how patient ranks are
    processes       is a process alive, is it the same one, and is it ours?
    patient_clock   a time that leaves out what a busy machine takes
    launch_secret   what ranks know and strangers do not
    signed_store    writes and reads what only ranks can have written
    status_board    what ranks tell each other through the store
    courier         talks with the store, which may not answer
    store_holder    who is to blame if it does not
    local_watch     the processes of this host
    driver          what the main thread does
    judging         who is to blame, or waited for
    signs           the signs of life that a rank reads
    connections     errors that other ranks have caused
    ending          one line, and the end of all ranks
    arrival         waits until all ranks have come
    launching       join the ranks that torchrun starts
    run_agreement   the name, the key and the processes of a run
    termination     notice SIGTERM at once
    watchdog        find a rank that fails, and end all ranks
    error_policy    which rank is to blame for an error
"""
