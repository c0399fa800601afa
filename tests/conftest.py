"""One thread for each process of the suite: at the sizes tested here more are no faster, and on a busy machine they
wait for each other, many times as slow. Set before torch is loaded; child processes inherit it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
