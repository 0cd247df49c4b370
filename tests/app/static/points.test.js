import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Points, position, smoothed } from 'points'

const upTo = (last, first = 1) => Array.from({ length: last - first + 1 }, (_, i) => first + i)
const line = (y) => ({ x: null, y, mean_x: null, mean_y: [] })
/** A run of ten steps, 0.1 s each, whose third was skipped. */
const page = (changes = {}) => {
  const x = changes.x ?? upTo(10)
  return {
    parent_step: 0,
    first: x[0],
    total: x.length,
    bucket: 1,
    x,
    mean_x: [],
    series: {
      loss: line(x.map(() => 1)),
      elapsed_ms: line(x.map((step) => step * 100)),
      data_us: line(x.map(() => null)),
    },
    metrics: {},
    skips: { steps: [3], counts: [1], before: 0 },
    resumptions: {},
    spikes: [],
    ...changes,
  }
}
/** Return steps in the format of updates. */
const steps = (step, changes = {}) => ({
  step,
  loss: step.map(() => 2),
  elapsed_ms: step.map((each) => each * 100),
  data_us: step.map(() => 5),
  flags: step.map(() => 0),
  ...changes,
})

test('position finds the first that is not less', () => {
  assert.deepEqual(
    [0, 1, 2, 3, 9].map((wanted) => position([1, 3, 3, 5], wanted)),
    [0, 0, 1, 1, 4],
  )
  assert.equal(position([], 1), 0)
})

test('steps that ran again take the place of those before, with their skips', () => {
  const points = new Points(page())
  points.addSteps(steps([3, 4, 5], { loss: [2, 'NaN', 'Infinity'], flags: [0, 1 | 2, 2] }))
  const nonfinite = { steps: [4, 5], counts: [1, 1], values: ['NaN', 'Infinity'] }
  assert.deepEqual(points.lines.loss, { x: upTo(5), y: [1, 1, 2, null, null], nonfinite })
  assert.deepEqual(points.skips.steps, [4])
  assert.deepEqual([points.total, points.last, points.end], [5, 5, 5])
})

test('of a zoom, steps beyond it are not shown', () => {
  const points = new Points(page())
  points.setPage(page({ x: upTo(6, 4), skips: { steps: [], counts: [], before: 1 } }), [4, 6])
  points.addSteps(steps([6, 7, 8]))
  assert.deepEqual(points.lines.loss.x, [4, 5, 6])
  assert.deepEqual([points.isWhole, points.hasAll([4, 6]), points.hasAll([4, 7])], [false, true, false])
})

test('what is unknown is a gap, and a value that is not finite is kept with its step until the step runs again', () => {
  const points = new Points(
    page({ series: { ...page().series, grad_norm: line([1, null, 'NaN', '-Infinity', 1, 1, 1, 1, 1, 'Infinity']) } }),
  )
  const { grad_norm: norm } = points.lines
  assert.deepEqual(norm.y, [1, null, null, null, 1, 1, 1, 1, 1, null])
  assert.deepEqual(norm.nonfinite, { steps: [3, 4, 10], counts: [1, 1, 1], values: ['NaN', '-Infinity', 'Infinity'] })
  points.addSteps(steps([4, 5], { grad_norm: [1, 'NaN'] }))
  assert.deepEqual(norm.nonfinite?.steps, [3, 5])
  assert.equal(points.lines.loss.nonfinite, undefined)
})

test('buckets count values that are not finite, and streamed steps add theirs', () => {
  const norm = { ...line([1, 2, 3, 4]), nonfinite: { steps: [64], counts: [7] } }
  const points = new Points(
    page({ bucket: 64, x: [1, 64, 65, 128], series: { ...page({ x: [1, 64, 65, 128] }).series, grad_norm: norm } }),
  )
  points.addSteps(steps([129], { grad_norm: ['NaN'] }))
  assert.deepEqual(points.lines.grad_norm.nonfinite, { steps: [64, 129], counts: [7, 1], values: [null, 'NaN'] })
  assert.deepEqual(points.nonfiniteAt(points.lines.grad_norm.nonfinite, 'time')?.x, [6.4, 12.9])
})

test('buckets know what they have; only later steps are added', () => {
  const points = new Points(page({ bucket: 64, x: [1, 64, 65, 128] }))
  points.addSteps(steps([127, 128, 129]))
  assert.deepEqual(points.lines.loss.x, [1, 64, 65, 128, 129])
})

test('applied updates leave out what was skipped, and of a fork what its parent did', () => {
  assert.deepEqual(new Points(page()).x(upTo(5), 'applied'), [1, 2, 2, 3, 4])
  const fork = new Points(
    page({ parent_step: 400, x: upTo(410, 401), skips: { steps: [403], counts: [1], before: 0 } }),
  )
  assert.deepEqual(fork.x(upTo(410, 401), 'applied'), [1, 2, 2, 3, 4, 5, 6, 7, 8, 9])
  const zoom = new Points(page({ x: upTo(110, 101), skips: { steps: [], counts: [], before: 40 } }))
  assert.deepEqual(zoom.x([101, 102], 'applied'), [61, 62])
})

test('time and examples stand where they are known', () => {
  const points = new Points(page({ examples: { before: 50, each: 8 } }))
  assert.deepEqual(points.x([1, 10], 'examples'), [58, 130])
  assert.deepEqual(new Points(page()).x([1], 'examples'), [])
  assert.deepEqual(points.x([1, 10], 'time'), [0.1, 1])
  assert.equal(new Points(page({ x: [1, 9] })).seconds(5), 0.5)
  assert.equal(new Points(page({ x: [] })).seconds(5), 0)
})

test('a metric is an axis: exact at its points, on a line between them, at its pace beyond', () => {
  const epoch = { x: [2, 4, 5, 8], y: [0, 1, 'NaN', 3], mean_x: [] }
  const points = new Points(page({ metrics: { epoch } }))
  assert.deepEqual(points.x([1, 2, 3, 4, 6, 8, 10], 'metric:epoch'), [0, 0, 0.5, 1, 2, 3, 4])
  assert.deepEqual(points.steps([0.5, 2], 'metric:epoch'), [3, 6])
  assert.deepEqual(points.x([1, 2], 'metric:unknown'), [1, 2])
  const one = new Points(page({ metrics: { epoch: { x: [3], y: [7], mean_x: [] } } }))
  assert.deepEqual(one.x([1, 3, 9], 'metric:epoch'), [7, 7, 7])
})

test('a stretch of any axis leads back to its steps, beyond the end at the mean pace', () => {
  const points = new Points(page({ examples: { before: 0, each: 8 } }))
  assert.deepEqual(points.steps([0.2, 0.5], 'time'), [2, 5])
  assert.deepEqual(points.steps([80, 160], 'examples'), [10, 20])
  assert.deepEqual(points.steps([2, 3], 'step'), [2, 3])
})

test('skips of a stretch are counted from its first to its last step', () => {
  const points = new Points(page({ skips: { steps: [3, 7, 8], counts: [1, 64, 2], before: 0 } }))
  assert.deepEqual(
    [
      [1, 10],
      [3, 7],
      [4, 6],
      [7.5, 8.9],
    ].map((range) => points.countSkips(range)),
    [67, 65, 0, 2],
  )
})

test('a metric that is whole stays so in a zoom; measured again, it goes on from there', () => {
  const metrics = { 'val/loss': { x: [2, 4], y: [1, 'NaN'], mean_x: [] } }
  const points = new Points(page({ metrics }))
  points.setPage(page({ metrics: { 'val/loss': { x: [4], y: [0], mean_x: [] } } }), [4, 6])
  const nonfinite = { steps: [4], counts: [1], values: ['NaN'] }
  assert.deepEqual(points.metrics.get('val/loss'), { x: [2, 4], y: [1, null], nonfinite, isWhole: true })
  points.addMetrics([
    { name: 'val/loss', step: 4, value: 3 },
    { name: 'own', step: 1, value: 'Infinity' },
  ])
  assert.deepEqual(points.metrics.get('val/loss')?.y, [1, 3])
  assert.deepEqual(points.metrics.get('own')?.nonfinite?.values, ['Infinity'])
})

test('a metric whose earlier points are not here gets no later ones, a new one begins', () => {
  const points = new Points(page({ metrics: { seen: { x: [1], y: [1], mean_x: [] } } }))
  points.names.add('unseen')
  points.addMetrics(['seen', 'unseen', 'new'].map((name) => ({ name, step: 2, value: 3 })))
  assert.deepEqual([...points.metrics.keys()], ['seen', 'new'])
  assert.deepEqual([...points.names], ['seen', 'unseen', 'new'])
  points.setMetrics({ unseen: { x: [1, 2], y: [2, 3], mean_x: [] } })
  assert.deepEqual(points.metrics.get('unseen'), { x: [1, 2], y: [2, 3], isWhole: true })
})

test('a metric of which points were missed is replaced as a whole', () => {
  const points = new Points(page({ metrics: { a: { x: [1, 2], y: [1, 2], mean_x: [] } } }))
  points.expireMetrics()
  points.setPage(page({ metrics: { a: { x: [1, 2, 3], y: [1, 2, 3], mean_x: [] } } }), [1, Infinity])
  assert.deepEqual(points.metrics.get('a'), { x: [1, 2, 3], y: [1, 2, 3], isWhole: true })
})

test('smoothing begins without bias, and leaves gaps', () => {
  assert.deepEqual(
    smoothed([4, null, 4], 0.9).map((y) => y && Number(y.toFixed(9))),
    [4, null, 4],
  )
  assert.deepEqual(smoothed([1, 2], 0), [1, 2])
  assert.equal(Number(smoothed([0, 1], 0.5)[1]?.toFixed(9)), 0.666666667)
})
