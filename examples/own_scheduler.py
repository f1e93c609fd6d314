"""A scheduler of your own in the real engine: shortest prompt first, without blocks (each request has its own cache).

Any object with the methods of ``minillm.schedule.scheduler.SchedulerProtocol`` will do. The order of arrival is what
``minillm.course.prove_scheduler`` asks for, so it proves the part that does not depend on the order.
"""

from minillm import LLM, SamplingParams
from minillm.course import prove_scheduler
from minillm.schedule.plan import ScheduledRequest, StepPlan


class FirstCome:
    """Who waits, who runs, and what the next step computes."""

    def __init__(self, max_num_seqs):
        self.max_num_seqs, self.waiting, self.running = max_num_seqs, [], []

    def add(self, request):
        self.waiting.append(request)

    def schedule(self):
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.running.append(self.waiting.pop(0))
        return StepPlan(tuple(ScheduledRequest(r, r.num_computed_tokens, r.num_missing_tokens) for r in self.running))

    def commit(self, plan, token_ids):
        for item in plan.scheduled:
            item.request.num_computed_tokens = item.end
        for item, token_id in zip(plan.sampling, token_ids):
            request, params = item.request, item.request.params
            if request.is_finished:  # its caller left during the step
                continue
            request.token_ids.append(token_id)
            if token_id in request.eos_token_ids and not params.ignore_eos:
                self.finish(request, "stop")
            elif token_id in params.stop_token_ids:
                self.finish(request, "stop", stop_reason=token_id)
            elif request.num_known_tokens >= request.max_total_tokens:
                self.finish(request, "length")

    def finish(self, request, reason, *, stop_reason=None, error=None):
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if not request.is_finished:
            request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error


class ShortestFirst(FirstCome):
    def schedule(self):
        self.waiting.sort(key=lambda request: len(request.prompt_token_ids))
        return super().schedule()


prove_scheduler(FirstCome)
with LLM("smollm2-135m", scheduler=ShortestFirst(1)) as llm:
    outputs = llm.generate(["The capital of France is the city of", "Two and two"], SamplingParams(max_tokens=8))
    for output in sorted(outputs, key=lambda output: output.metrics.finished_s):
        print(f"{output.metrics.e2e_s * 1e3:.0f} ms: {output.prompt}{output.outputs[0].text!r}")
