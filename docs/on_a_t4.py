"""Print what a T4 does with forty models: `colab run --gpu T4 docs/on_a_t4.py`, or any Python with a GPU."""

import datetime
import subprocess
import sys

SOURCE = "cpbkit @ git+https://github.com/cpbkit/cpbkit"
subprocess.run([sys.executable, "-m", "pip", "install", "-qq", "--no-build-isolation", SOURCE], check=True)
print(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), flush=True)
for command in ("doctor", "bench sweep --quick"):
    print(f"$ cpbkit {command}", flush=True)
    subprocess.run([sys.executable, "-m", "cpbkit", *command.split()], check=False)
