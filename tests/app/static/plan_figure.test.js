// The chart of a precision plan, before Plotly draws it.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { ends, planFigure } from 'plan_figure'

const point = (precision, time, error, isWithin = true) => ({
  precision,
  time,
  error,
  cosine: 1,
  is_within: isWithin,
  label: `${precision} <b>`,
  init_scale: null,
})
const plan = {
  max_error: 0.1,
  cost: 'operations',
  points: [
    point('fp16', 0.1, 'Infinity', false),
    point('fp16', 0.125, 0.001),
    point('bf16', 0.125, 0.02),
    point('fp32', 1, 0),
  ],
}

test('errors of 0 and infinity are drawn at the ends of the axis', () => {
  assert.deepEqual(ends(plan), [-4, 0])
  const { data, layout } = planFigure(plan, {})
  assert.deepEqual(layout.yaxis.range, [-4, 0])
  const of = (name) => data.find((trace) => trace.name === name)
  assert.deepEqual(of('fp16').y, [1, 0.001])
  assert.deepEqual(of('fp32').y, [1e-4])
  assert.deepEqual(of('fp16').marker.symbol, ['circle-open', 'circle'])
  assert.equal(of('fp16').customdata[0][2], '∞')
  assert.equal(of('fp16').customdata[0][0], 'fp16 &lt;b&gt;')
})

test('the front falls, without points that only have fewer modules', () => {
  const [front] = planFigure(plan, {}).data
  assert.deepEqual(front.x, [0.125, 1])
})

test('the bound is a line where the axis can show it, and times are named as what they are', () => {
  const [bound] = planFigure(plan, {}).layout.shapes
  assert.equal(bound.y0, 0.1)
  assert.equal(planFigure({ ...plan, max_error: 0 }, {}).layout.shapes.length, 0)
  assert.match(planFigure(plan, {}).layout.xaxis.title.text, /predicted/)
  assert.match(planFigure({ ...plan, cost: 'measured' }, {}).layout.xaxis.title.text, /measured/)
})

test('a plan in which nothing is finite has an axis', () => {
  const only = { ...plan, max_error: 0, points: [point('fp32', 1, 0)] }
  assert.deepEqual(ends(only), [-1, 1])
})
