from tests.backends.vllm.test_served import *
from tests.backends.vllm.test_served import home
import subprocess
def test_try2(home):
    longest = prompts([1900], shared=0, seed=7)
    alone = [[p] for p in SHARED]
    job = {"rounds": [SHARED, *alone, longest, alone[0]], "tokens": 24, "environment": {"KVRECALL_TEST_BLOCKS": "30"}}
    own = subprocess.run
    def run(*a, **k):
        k["timeout"]=200; made = own(*a, **k); print("\n".join(l for l in (made.stdout+made.stderr).splitlines() if "kvrecall" in l or "sync" in l)); return made
    subprocess.run = run
    made = answers(home, job, METHODS["balanced"], num_gpu_blocks_override=120, worker_cls="tests.backends.vllm.refusing.Worker", async_scheduling=True)
    print([[each["reasons"] for each in one] for one in made["rounds"]])
    assert 0
