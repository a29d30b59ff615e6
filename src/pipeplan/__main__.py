"""`python -m pipeplan`: the same as the command `pipeplan`."""

from pipeplan.cli import main

if __name__ == "__main__":
    main()
