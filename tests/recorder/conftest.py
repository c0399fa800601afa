import sys
from pathlib import Path

# The tests here share `toy_runs`; some of them import it in processes of their own, too.
sys.path.insert(0, str(Path(__file__).parent))
