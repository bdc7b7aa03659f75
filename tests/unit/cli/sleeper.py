"""In place of a dry run: never ends."""

import time

if __name__ == "__main__":
    print("going to sleep", flush=True)
    time.sleep(600)
