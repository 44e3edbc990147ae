"""References: every method as a program to read, one file each, with torch alone and without a word about speed.

Start with `tent`, the shortest that learns, then `eatta`, then `wise`. Every file has `run(model, stream, …)`, which
yields the logits of each batch before it learns from it, and runs on a small made stream: `python -m
wise_atta.reference.wise`. The tests hold the package to these programs: in float64 they agree to 1e-9.

What holds for all of them:

- The scored prediction is the one made before the update. Batches are numbered from 1; `answer(t, i)` is the class of
  sample i of batch t.
- The model is in evaluation mode and is changed in place. BatchNorm normalises by the batch unless a file says
  otherwise.
- A filter passes a sample when the inequality is strict. A batch that leaves nothing to learn from takes no step, not
  even one of momentum.
- Chance is an argument. Unless given it is drawn from the number of the batch, so that a run can be repeated.
"""
