"""In place of a dry run: ends well and reports a problem."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    result = {"problem": "ranks ended with different weights", "losses": [1.0]}
    Path(sys.argv[3], "result.json").write_text(json.dumps(result))
