"""The kernels of the GPU path, in Triton: one file a kernel or pair, each with its torch reference beside it.

What holds in all of them:

* Values are widened to fp32 right after the load and all arithmetic is done there.  Only operands of a matrix product
  go back to the type that the tensor cores take (``launch.product_type``); their sums are fp32.
* A row's result depends on the row alone: tiles, lengths of splits and orders of sums are fixed by the model's shape,
  never by the batch.  Where a faster choice gives that up, it is an option that says so.
* Three query heads may share a KV head: rows are cut into (token, head) by // and %, never by shifts.
* They are started through ``launch.launch`` alone, so that what the runner starts and what ``ahead_of_time`` compiles
  and tabulates cannot differ.  Speed on a GPU is unmeasured as long as docs/kernels.md does not say otherwise.
"""
