// What is drawn, before Plotly draws it.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { between } from 'axis'
import { figure, lossAxis, scaleAxis } from 'figure'
import { lostAt } from 'heatmap'
import { Points } from 'points'
import { parallelFigure } from 'parallel'
import { trialsFigure } from 'trials'

const NAMES = ['loss', 'scale', 'grad_norm', 'grad_norm_clipped', 'lr', 'elapsed_ms', 'step_us', 'data_us']
const view = { x: 'step', loss: 'linear', smooth: 0, range: null, rows: {}, hidden: [], pinned: [], collapsed: [] }
const line = (y) => ({ x: null, y, mean_x: null, mean_y: [] })
const pointsOf = (series, metrics = {}) => new Points({
  parent_step: 0, first: 1, total: 3, bucket: 1, x: [1, 2, 3], mean_x: [], metrics, resumptions: {}, spikes: [],
  series: Object.fromEntries(NAMES.map((name) => [name, line(series[name] ?? [1, 2, 3])])),
  skips: { steps: [], counts: [], before: 0 }, nonfinite: { steps: [], counts: [] },
})
const titles = (points, known) => figure(points, view, {}, known, 800).layout.annotations.map(({ text }) => text.split(',')[0])

test('labels of a logarithmic axis stand apart', () => {
  assert.equal(between([0.08, 1]), 'D2')
  assert.equal(between([1e-3, 1]), 1)
  assert.equal(between([1e-12, 1]), 3)
})

test('rows are those that there are numbers for, or will be', () => {
  const unknown = pointsOf({ data_us: [null, null, null] })
  assert.deepEqual(titles(unknown, { scaled: true, timed: true }), ['Loss', 'Loss scale', 'Gradient norm', 'Learning rate'])
  assert.deepEqual(titles(pointsOf({}), { scaled: false, timed: false }), ['Loss', 'Gradient norm', 'Learning rate', 'Step'])
})

test('a row without numbers has no axes', () => {
  const none = Object.fromEntries(NAMES.map((name) => [name, []]))
  const { layout } = figure(pointsOf({ ...none, loss: [1, null, 3] }), view, {}, { scaled: true, timed: false }, 800)
  assert.deepEqual(['yaxis2', 'yaxis3', 'yaxis4', 'xaxis'].map((axis) => layout[axis].visible), [undefined, false, false, undefined])
  const nothing = figure(pointsOf(none), view, {}, { scaled: true, timed: false }, 800).layout
  assert.deepEqual([nothing.xaxis.visible, nothing.yaxis2.visible, nothing.shapes], [false, false, []])
})

test('what somebody called something is no markup, wherever Plotly is told of it', () => {
  const name = '<a href="https://evil.example">x</a> %{x} &lt;'
  const measured = { [name]: { x: [1], y: [1], mean_x: [] } }
  const trial = { number: 1, run_id: 1, name, state: 'complete', value: 1 }
  for (const made of [
    figure(pointsOf({}, measured), view, {}, { scaled: true, timed: true }, 800),
    parallelFigure({ ids: ['1'], labels: { 1: name }, columns: new Map([[name, [name]]]), settings: [name], up: name }, {}),
    trialsFigure({ trials: [trial], metric: name, goal: 'minimise' }, {}),
  ]) {
    const { layout, data } = made
    const said = JSON.stringify([layout, data.map(({ hoverinfo, name: called, ...trace }) => [trace, hoverinfo ? '' : called])])
    assert.ok(said.includes('&lt;a'))
    assert.ok(!said.includes('<a'))
    assert.ok(!said.includes('%{x} &'))
  }
})

test('a metric that comes in shrinks the others, and the figure keeps its height', () => {
  const measured = (count) => Object.fromEntries(Array.from({ length: count }, (_, i) => [`m${i}`, { x: [1], y: [1], mean_x: [] }]))
  const heightOf = (count) => figure(pointsOf({}, measured(count)), view, {}, { scaled: true, timed: true }, 800).layout.height
  assert.deepEqual([heightOf(2), heightOf(3)], [heightOf(1), heightOf(1)])
  assert.ok(heightOf(40) > heightOf(1))
})

test('a scale has ticks at powers of two, however far it falls', () => {
  assert.deepEqual(scaleAxis([65536, null, 32768]).range, [14, 17].map((e) => Math.log10(2 ** e)))
  const axis = scaleAxis([2 ** -126, 2 ** 24])
  assert.ok(axis.tickvals?.every((value) => value > 0 && Number.isFinite(Math.log2(value))))
  assert.deepEqual(scaleAxis([null, 0]), { type: 'log' })
})

test('a log axis of few decades shows parts of them', () => {
  const log = { ...view, loss: 'log' }
  assert.deepEqual([lossAxis(log, [1, 30, null, -1, 0]).dtick, lossAxis(log, [1e-6, 1e6]).dtick], ['D2', 3])
})

test('what a scale loses is counted without the zeros', () => {
  const sample = { step: 1, scale: 2 ** 10, lowest_exponent: -40, counts: [4, 0, 0, 0, 0, 0, 12], zeros: 100, nonfinite: 0 }
  assert.deepEqual(lostAt(sample, null), { underflow: 0.25, nearOverflow: 0 })
  assert.deepEqual(lostAt(sample, 16), { underflow: 0, nearOverflow: 0 })
  assert.deepEqual(lostAt(sample, 48), { underflow: 0, nearOverflow: 0.75 })
})

test('the best until then never gets worse, whichever way is up', () => {
  const trials = [3, 5, 1, 4].map((value, i) => ({ number: i + 1, value, state: 'complete', name: `t${i}`, run_id: i }))
  const best = (goal) => trialsFigure({ trials, metric: 'loss', goal }, {}).data[0].y
  assert.deepEqual([best('minimise'), best('maximise')], [[3, 3, 1, 1], [3, 5, 5, 5]])
})
