"""Leaves a process behind, and kills the one that would end it."""

# ruff: noqa: PTH208
import os
import signal
import subprocess
import sys
import time

from common import plan

wanted = plan()
mark = wanted["mark"]
output = None if wanted["holds_output"] else subprocess.DEVNULL
code = "import time; time.sleep(120)"
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            words = [sys.executable, "-c", code, mark]
            subprocess.Popen(words, start_new_session=True, stdout=output, stderr=output)
        os._exit(0)
    os.wait()
parent = os.getppid()
try:
    for each in os.listdir("/proc"):  # also those that a parent could request
        if each.isdecimal() and int(each) == parent:
            os.kill(parent, signal.SIGKILL)
except OSError as error:
    print("the parent cannot be killed:", error, flush=True)
time.sleep(1)
os._exit(0)
