"""Started in the background of a shell, a process ignores Control-C, and so would each program that a test starts."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
