// What is drawn, before Plotly draws it.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { NONFINITE_SIGNS, nonfiniteMarks } from 'annotations'
import { dotTicks, linearAxis, logAxis, logTicks, robustRange, ticksOf } from 'axis'
import { runsFigure } from 'comparison'
import { valueAt } from 'crosshair'
import { figure, lossAxis, lossesOf, rowsOf, scaleAxis } from 'figure'
import { number } from 'formats'
import { lostAt } from 'heatmap'
import { setLog, setRange, setTrimmed, takeAxes, unkept } from 'panel_axes'
import { Points } from 'points'
import { parallelFigure } from 'parallel'
import { trialsFigure } from 'trials'

const NAMES = ['loss', 'scale', 'grad_norm', 'grad_norm_clipped', 'lr', 'elapsed_ms', 'step_us', 'data_us']
const view = {
  x: 'step',
  smooth: 0,
  range: null,
  rows: {},
  logs: [],
  trimmed: [],
  hidden: [],
  pinned: [],
  collapsed: [],
}
const line = (y) => ({ x: null, y, mean_x: null, mean_y: [] })
const pointsOf = (series, metrics = {}) =>
  new Points({
    parent_step: 0,
    first: 1,
    total: 3,
    bucket: 1,
    x: [1, 2, 3],
    mean_x: [],
    metrics,
    resumptions: {},
    spikes: [],
    series: Object.fromEntries(NAMES.map((name) => [name, line(series[name] ?? [1, 2, 3])])),
    skips: { steps: [], counts: [], before: 0 },
  })
const SIZE = { width: 800, height: 240 }
const rows = (points, known) => rowsOf(points, view, known).filter(({ has }) => has)
const panel = (name, points, known = { scaled: true, examples: 0 }) =>
  figure(
    rows(points, known).find((row) => row.name === name),
    points,
    view,
    {},
    SIZE,
  )
/** A panel as a picture of it is saved, with its title. */
const pictured = ({ data, layout, title }) => ({ data, layout: { ...layout, title } })

test('a run of numbers only has no panels of steps before its first one', () => {
  const metrics = { reward: { x: [1], y: [0.5], mean_x: [], mean_y: [] } }
  const none = Object.fromEntries(NAMES.map((name) => [name, [null, null, null]]))
  const known = { scaled: false, examples: 0, onlyMetrics: true }
  assert.deepEqual(
    rows(pointsOf(none, metrics), known).map(({ name }) => name),
    ['reward'],
  )
  assert.deepEqual(
    rows(pointsOf({}, metrics), known)
      .slice(0, 2)
      .map(({ name }) => name),
    ['loss', 'norm'],
  )
})

test('a result after the last step is in its panel, and a run without gradient norms has no panel of them', () => {
  const metrics = { 'summary/final': { x: [5], y: [0.9], mean_x: [] } }
  const known = { scaled: false, examples: 0 }
  const points = pointsOf({ grad_norm: [null, null, null], grad_norm_clipped: [null, null, null] }, metrics)
  const drawn = panel('summary/final', points, known)
  assert.deepEqual(drawn.data[0].x, [5])
  assert.deepEqual(drawn.axis.range, [1, 5])
  assert.deepEqual(panel('loss', points, known).axis.range, [1, 3])
  const run = { id: '1', label: 'one', place: 0, points, group: null }
  const compared = (name) =>
    runsFigure({ runs: [run], row: { name, title: name }, view, band: 'range' }, {}, SIZE).axis.range
  assert.deepEqual(
    [compared('summary/final'), compared('loss')],
    [
      [1, 5],
      [1, 3],
    ],
  )
  assert.ok(!rows(points, known).some(({ name }) => name === 'norm'))
})

test('smoothing draws noisy series twice, and what a scaler or a schedule has set as it was', () => {
  const metrics = { accuracy: { x: [1, 2, 3], y: [0, 1, 0], mean_x: [], mean_y: [] } }
  const points = pointsOf({ scale: [4, 2, 2], lr: [1, 2, 3] }, metrics)
  const known = { scaled: true, examples: 8 }
  const drawn = (smooth) =>
    Object.fromEntries(
      rowsOf(points, { ...view, smooth }, known)
        .filter(({ has }) => has)
        .map(({ name, lines }) => [
          name,
          lines({ range: [1, 3], pixels: 700 }, {}).map((each) => [each.name, [...each.y]]),
        ]),
    )
  const [raw, smooth] = [drawn(0), drawn(0.9)]
  for (const name of ['scale', 'lr']) assert.deepEqual(smooth[name], raw[name])
  for (const name of ['loss', 'norm', 'accuracy', 'data', 'examples']) {
    assert.equal(smooth[name].length, 2 * raw[name].length, name)
    assert.deepEqual(smooth[name][0], raw[name][0])
    assert.notDeepEqual(smooth[name][1][1], raw[name][0][1])
  }
})

test('labels of a logarithmic axis stand apart', () => {
  assert.deepEqual(logTicks(0.08, 1), [0.1, 0.2, 0.5, 1])
  assert.deepEqual(logTicks(1e-3, 1).map(Math.log10).map(Math.round), [-3, -2, -1, 0])
  assert.deepEqual(logTicks(1e-12, 1).map(Math.log10).map(Math.round), [-12, -9, -6, -3, 0])
  assert.deepEqual(logTicks(9e-4, 9.9), [1e-3, 1e-2, 0.1, 1])
  assert.ok(logTicks(0.69, 0.71).length >= 3)
  assert.ok(logAxis([0.5, 0.5]).ticktext.length >= 3)
  assert.ok(logAxis([1, 1000], [2, 2.01]).ticktext.length >= 3)
  assert.deepEqual(logAxis([null, -1]), { type: 'log' })
})

test('a loop that proves to have no scaler draws no scale', () => {
  const known = { scaled: true, proven: false, examples: 0 }
  const lines = (scale) => panel('scale', pointsOf({ scale }), known).data.map(({ name }) => name)
  assert.ok(!lines([1, 1, null]).includes('scale'))
  assert.ok(lines([1024, 1024, 512]).includes('scale'))
})

test('panels are those that there are numbers for', () => {
  const titles = (points, known) => rows(points, known).map(({ title }) => title)
  const unknown = pointsOf({ data_us: [null, null, null] })
  assert.deepEqual(titles(unknown, { scaled: true, examples: 0 }), [
    'Loss',
    'Loss scale',
    'Gradient norm',
    'Learning rate',
  ])
  assert.deepEqual(titles(pointsOf({}), { scaled: false, examples: 0 }), [
    'Loss',
    'Gradient norm',
    'Time per step, ms',
    'Learning rate',
  ])
})

test('a panel without numbers has no axes', () => {
  const none = Object.fromEntries(NAMES.map((name) => [name, []]))
  const visible = ({ layout }) => [layout.xaxis.visible, layout.yaxis2.visible]
  assert.deepEqual(visible(panel('loss', pointsOf({ ...none, loss: [1, null, 3] }))), [undefined, undefined])
  const scale = panel('scale', pointsOf(none))
  assert.deepEqual([visible(scale), scale.layout.shapes], [[false, false], []])
})

/** Return positions and texts of a figure's marks, by their name. */
const marksOf = ({ marks, layout: { shapes } }) =>
  Object.fromEntries(
    marks
      .filter(({ name, x }) => x.length && name in NONFINITE_SIGNS)
      .map(({ name, x, text }) => [
        name,
        {
          x,
          isAbove: shapes
            .filter((shape) => shape.name === name)
            .map(({ path }) => Number(path.match(/,([\d.]+)/)[1]) > 0.5),
          text,
        },
      ]),
  )

test('values that are not finite have marks at the edge, in every panel and by one mechanism', () => {
  const metrics = { accuracy: { x: [1, 2, 3], y: [0, '-Infinity', 1], mean_x: [], mean_y: [] } }
  const points = pointsOf(
    { loss: [1, 'NaN', 'Infinity'], grad_norm: [null, 'Infinity', 1], grad_norm_clipped: [null, 'Infinity', 1] },
    metrics,
  )
  assert.deepEqual(marksOf(panel('loss', points)), {
    NaN: { x: [2], isAbove: [false], text: ['loss NaN at step 2'] },
    '∞': { x: [3], isAbove: [true], text: ['loss ∞ at step 3'] },
  })
  assert.deepEqual(Object.keys(marksOf(panel('norm', points))), ['∞'])
  assert.deepEqual(marksOf(panel('accuracy', points)), {
    '−∞': { x: [2], isAbove: [false], text: ['accuracy −∞ at step 2'] },
  })
  assert.deepEqual(marksOf(panel('scale', points)), {})
  assert.equal(
    panel('norm', pointsOf({ grad_norm_clipped: [1, 2, 3] })).data.length,
    panel('norm', points).data.length - 1,
  )
})

test('of a range in buckets a mark says how many values are not finite', () => {
  const points = pointsOf({})
  points.lines.loss.nonfinite = { steps: [1], counts: [12], values: [null] }
  assert.deepEqual(marksOf(panel('loss', points)), {
    'not finite': { x: [1], isAbove: [false], text: ['loss not finite: 12 steps from 1'] },
  })
})

test('very many values that are not finite have as many marks as have room', () => {
  const steps = Array.from({ length: 5000 }, (_, i) => i)
  const nonfinite = { steps, x: steps, counts: steps.map(() => 1), values: steps.map(() => 'NaN') }
  const marked = (lines) => nonfiniteMarks(lines, { range: [0, 5000], pixels: 900 }, 200, 0).traces[0]
  const one = marked([{ label: 'own', color: 'red', nonfinite }])
  assert.ok(one.x.length > 50 && one.x.length <= 100, String(one.x.length))
  assert.match(one.text[0], /^own NaN: \d+ steps from 0 to \d+$/)
  assert.ok(marked(Array(50).fill({ label: 'own', color: 'red', nonfinite })).x.length <= 900)
})

test('a value that is not finite is the value at its step', () => {
  const {
    lines: [loss],
  } = panel('loss', pointsOf({ loss: [1, 'NaN', '-Infinity'] }))
  assert.deepEqual(
    [1, 2, 3, null].map((x) => valueAt(loss, x)),
    ['1', 'NaN', '−∞', '−∞'],
  )
  const {
    lines: [norm],
  } = panel('norm', pointsOf({ grad_norm: [1, null, 'Infinity'] }))
  assert.deepEqual(
    [1, 2, 3].map((x) => valueAt(norm, x)),
    ['1', '–', '∞'],
  )
  const bucket = {
    name: 'loss',
    color: '',
    x: [1, 60, 64],
    y: [1, 2, 3],
    nonfinite: { x: [64, 128], values: [null, null] },
  }
  assert.deepEqual(
    [1, 64, 120, 128].map((x) => valueAt(bucket, x)),
    ['1', '3', '3', 'not finite'],
  )
})

test('the value at a step is the last one that was recorded until then', () => {
  const sparse = { name: 'val/loss', color: '', x: [100, 200, 300], y: [3, 2, 1] }
  assert.deepEqual(
    [50, 100, 265, 300, 400, null].map((x) => valueAt(sparse, x)),
    ['–', '3', '2', '1', '1', '1'],
  )
})

test('a crosshair has what was recorded of each run, in a mean and smoothed too', () => {
  const runs = ['1', '2'].map((id, place) => ({
    id,
    label: id,
    place,
    group: 'all',
    groupPlace: 0,
    points: pointsOf({ loss: [4 - place, 2 - place, 8] }),
  }))
  const { recorded } = runsFigure(
    { runs, row: { name: 'loss', title: 'Loss' }, view: { ...view, smooth: 0.9 }, band: 'range' },
    { run0: 'rgb(0, 0, 0)' },
    SIZE,
  )
  assert.deepEqual(
    recorded().map(({ run, ...line }) => [run.id, valueAt(line, 2)]),
    [
      ['1', '2'],
      ['2', '1'],
    ],
  )
})

test('ticks of steps have separators in a comparison, as in a run', () => {
  const run = { id: '1', label: 'one', place: 0, points: pointsOf({}), group: null }
  const row = { name: 'loss', title: 'Loss' }
  const figure = runsFigure({ runs: [run], row, view: { ...view, range: [1, 3000] }, band: 'range' }, {}, SIZE)
  const { tickvals, ticktext } = figure.layout.xaxis
  assert.ok(tickvals.at(-1) >= 1000)
  assert.deepEqual(
    ticktext,
    tickvals.map((x) => x.toLocaleString('en-US')),
  )
})

test('a comparison marks the values of each run in its colour, and its means too', () => {
  const colors = { run0: 'rgb(1, 1, 1)', run1: 'rgb(2, 2, 2)' }
  const runOf = (place, loss, group = null) => ({
    id: String(place),
    label: `run ${place}`,
    place,
    groupPlace: 0,
    group,
    points: pointsOf({ loss }),
  })
  const drawn = (...runs) =>
    runsFigure({ runs, row: { name: 'loss', title: 'Loss' }, view, band: 'range' }, colors, SIZE)
  const two = drawn(runOf(0, [1, 'NaN', 1]), runOf(1, [1, 1, 'Infinity']))
  assert.deepEqual(marksOf(two), {
    NaN: { x: [2], isAbove: [false], text: ['run 0 NaN at step 2'] },
    '∞': { x: [3], isAbove: [true], text: ['run 1 ∞ at step 3'] },
  })
  assert.deepEqual(
    two.layout.shapes.map(({ line }) => line.color),
    [colors.run0, colors.run1],
  )
  assert.equal(two.signs, '✕ NaN · ▲ ∞')
  assert.equal(valueAt(two.lines[0], 2), 'NaN')
  assert.deepEqual(Object.keys(marksOf(drawn(runOf(0, [1, 'NaN', 1], 'a'), runOf(1, [1, 1, 1], 'a')))), ['NaN'])
  assert.deepEqual([drawn(runOf(0, [1, 1, 1])).layout.shapes, drawn(runOf(0, [1, 1, 1])).signs], [[], ''])
})

test('charts begin at a metric of step 0', () => {
  const points = pointsOf({}, { 'val/loss': { x: [0, 3], y: [2, 1], mean_x: [] } })
  assert.deepEqual(panel('loss', points).layout.xaxis.range, [0, 3])
  assert.deepEqual(panel('loss', pointsOf({})).layout.xaxis.range, [1, 3])
})

test('a line of one point is a point', () => {
  const single = panel('val/accuracy', pointsOf({}, { 'val/accuracy': { x: [0], y: [0.5], mean_x: [] } }))
  assert.equal(single.data[0].mode, 'lines+markers')
})

test('a panel has a logarithmic axis by choice', () => {
  const points = pointsOf({})
  const row = rows(points, { scaled: true, examples: 0 }).find(({ name }) => name === 'lr')
  const typeOf = (logs) => figure(row, points, { ...view, logs }, {}, SIZE).layout.yaxis2.type
  assert.deepEqual([typeOf([]), typeOf(['lr'])], ['linear', 'log'])
  const loss = rows(points, { scaled: true, examples: 0 }).find(({ name }) => name === 'loss')
  const compared = (logs) =>
    runsFigure(
      {
        runs: [{ id: '1', label: 'a', place: 0, group: null, points }],
        row: { name: 'loss', title: 'Loss' },
        view: { ...view, logs },
        band: 'range',
      },
      {},
      SIZE,
    ).layout.yaxis2
  for (const axisOf of [(logs) => figure(loss, points, { ...view, logs }, {}, SIZE).layout.yaxis2, compared]) {
    assert.deepEqual([axisOf([]).type, axisOf(['loss']).type, axisOf(['lr']).type], ['linear', 'log', 'linear'])
  }
})

test('a gradient norm that nothing clips is one line', () => {
  const lines = (clipped) => panel('norm', pointsOf({ grad_norm_clipped: clipped })).lines.map(({ name }) => name)
  assert.deepEqual([lines([1, 2, 3]), lines([1, 1, 1])], [['norm'], ['before clipping', 'after clipping']])
})

test('what somebody called something is no markup, wherever Plotly is told of it', () => {
  const name = '<a href="https://evil.example">x</a> %{x} &lt;'
  const measured = { [name]: { x: [1], y: [1], mean_x: [] } }
  const trial = { number: 1, run_id: 1, name, state: 'complete', value: 1 }
  for (const made of [
    pictured(panel(name, pointsOf({}, measured))),
    parallelFigure(
      { ids: ['1'], labels: { 1: name }, columns: new Map([[name, [name]]]), settings: [name], up: name },
      {},
    ),
    trialsFigure({ trials: [trial], metric: name, goal: 'minimize' }, {}),
  ]) {
    const { layout, data } = made
    const said = JSON.stringify([
      layout,
      data.map(({ hoverinfo, name: called, ...trace }) => [trace, hoverinfo ? '' : called]),
    ])
    assert.ok(said.includes('&lt;a'))
    assert.ok(!said.includes('<a'))
    assert.ok(!said.includes('%{x} &'))
  }
})

test('a range without outliers has the values between quantiles, widened, and no room where nothing is', () => {
  const x = Array.from({ length: 100 }, (_, i) => i)
  const noise = x.map((i) => 1 + (i % 10) / 10)
  const range = (y, isLog = false, stretch = [0, 99]) =>
    robustRange([{ x: x.slice(0, y.length), y }], stretch, isLog)?.map((end) => Number(end.toFixed(2)))
  assert.equal(range(noise), undefined)
  assert.deepEqual(range(noise.map((y, i) => (i === 50 ? 1000 : y))), [0.95, 2.06])
  assert.deepEqual(range(noise.map((y, i) => (i === 50 ? -1000 : y))), [0.84, 1.95])
  assert.deepEqual(
    range(
      noise.map((y, i) => (i === 50 ? 1e6 : 10 ** y)),
      true,
    ),
    [0.95, 2.06],
  )
  assert.equal(
    range(
      noise.map((y, i) => (i === 50 ? 1000 : y)),
      false,
      [60, 99],
    ),
    undefined,
  )
  assert.deepEqual(range([4, 4, null, 4, 4, 4, 4, 4, 4, 80]), [3.98, 4.5])
  assert.deepEqual(
    [range([]), range([null, null]), range([3]), range([3, 3]), range([1, 2, 3, 4])],
    Array(5).fill(undefined),
  )
})

test('a panel that ignores outliers has its own range, unless it is zoomed', () => {
  const x = Array.from({ length: 40 }, (_, i) => i + 1)
  const metrics = { own: { x, y: x.map((i) => (i === 20 ? 500 : i % 5)), mean_x: [] } }
  const points = pointsOf({ elapsed_ms: x }, metrics)
  points.lines.elapsed_ms = { x, y: x }
  const row = rows(points, { scaled: true, examples: 0 }).find(({ name }) => name === 'own')
  const drawn = (changes) => {
    const { layout, outliers } = figure(row, points, { ...view, ...changes }, {}, SIZE)
    return { range: layout.yaxis2.range, outliers }
  }
  const compared = (changes) =>
    runsFigure(
      {
        runs: [{ id: '1', label: 'a', place: 0, group: null, points }],
        row: { name: 'own', title: 'own' },
        view: { ...view, ...changes },
        band: 'range',
      },
      {},
      SIZE,
    )
  assert.deepEqual(drawn({}), { range: [0, 525], outliers: '' })
  const { range, outliers } = drawn({ trimmed: ['own'] })
  assert.equal(outliers, `values above ${number(range[1])} not shown`)
  assert.ok(range[0] < 0 && range[1] > 4 && range[1] < 10, String(range))
  assert.deepEqual(drawn({ trimmed: ['own'], rows: { own: [0, 600] } }), { range: [0, 600], outliers: '' })
  const both = compared({ trimmed: ['own'] })
  assert.deepEqual([both.layout.yaxis2.range, both.signs], [range, outliers])
  assert.deepEqual(compared({}).layout.yaxis2.range, [0, 525])
})

test('a choice for the axis of a panel undoes those that it excludes', () => {
  const [own, kept] = [{ ...view, rows: {}, logs: [], trimmed: [] }, unkept()]
  setRange('lr', [0, 1], own, kept)
  setTrimmed('lr', true, own, kept)
  assert.deepEqual([own.rows, kept.ranges, own.trimmed, kept.trimmed], [{}, {}, ['lr'], ['lr']])
  setLog('lr', true, own, kept)
  assert.deepEqual([own.trimmed, kept.logs], [['lr'], ['lr']])
  setRange('lr', [0, 1], own, kept)
  assert.deepEqual([own.rows, kept.ranges, own.trimmed, kept.trimmed], [{ lr: [0, 1] }, { lr: [0, 1] }, [], []])
  setLog('lr', false, own, kept)
  assert.deepEqual([own.rows, kept.ranges, own.logs, kept.logs], [{}, {}, [], []])
  const other = { ...view, rows: { loss: [1, 2] }, logs: ['x'], trimmed: [] }
  takeAxes(other, { ranges: { loss: [3, 4], lr: [5, 6] }, logs: ['x', 'y'], trimmed: ['z'] })
  assert.deepEqual([other.rows, other.logs, other.trimmed], [{ loss: [1, 2], lr: [5, 6] }, ['x', 'y'], ['z']])
})

test('an axis of counts has none below 0', () => {
  assert.deepEqual(dotTicks([0, 400]), [0, 200, 400, 600])
  assert.deepEqual(dotTicks([0, 0])[0], 0)
  assert.deepEqual(dotTicks([-1, 1])[0] < -0.9, true)
})

test('a loss that is logged again as a metric, with steps from 1 or 0, is drawn once', () => {
  const metricOf = (x, y) => ({ x, y, mean_x: [], mean_y: [], nonfinite: null })
  for (const steps of [
    [1, 2, 3],
    [0, 1, 2],
  ]) {
    const points = pointsOf(
      { loss: [1, 2, 3] },
      { 'train/loss': metricOf(steps, [1, 2, 3]), 'val/loss': metricOf([2], [5]) },
    )
    assert.deepEqual(
      panel('loss', points).lines.map(({ name }) => name),
      ['loss', 'val/loss'],
    )
  }
})

test('a loss or scale that is logged again has no panel of its own', () => {
  const metricOf = (y) => ({ x: [1, 2, 3], y, mean_x: [], mean_y: [], nonfinite: null })
  const points = pointsOf(
    { loss: [1, 2, 3], scale: [8, 4, 4] },
    { loss: metricOf([1, 2, 3]), scale: metricOf([4, 4, 2]) },
  )
  const panels = () =>
    rows(points, { scaled: true, examples: 0 })
      .filter(({ metric, has }) => metric && has)
      .map(({ metric }) => metric)
  assert.deepEqual(panels(), [])
  points.metrics.set('loss', metricOf([1, 2, 2]))
  assert.deepEqual(panels(), ['loss'])
})

test('each logged loss has a colour of its own, by the order of names', () => {
  const logged = { x: [1], y: [5], mean_x: [], mean_y: [], nonfinite: null }
  const points = pointsOf({}, { 'val/loss': logged, 'train/loss': logged, 'test/loss': logged })
  const [row] = rows(points, { scaled: true, examples: 0 })
  const colors = { loss: 'blue', val: 'teal', run1: 'red', run2: 'green' }
  const drawn = figure(row, points, view, colors, SIZE).data.filter(({ name }) => name)
  assert.deepEqual(Object.fromEntries(drawn.map(({ name, line }) => [name, line.color])), {
    loss: 'blue',
    'test/loss': 'teal',
    'train/loss': 'red',
    'val/loss': 'green',
  })
})

test('a scale has ticks at powers of two, however far it falls', () => {
  assert.deepEqual(
    scaleAxis([65536, null, 32768]).range,
    [14, 17].map((e) => Math.log10(2 ** e)),
  )
  const axis = scaleAxis([2 ** -126, 2 ** 24])
  assert.ok(axis.tickvals?.every((value) => value > 0 && Number.isFinite(Math.log2(value))))
  assert.deepEqual(scaleAxis([null, 0]), { type: 'log' })
})

test('a constant is shown from zero on, at its size', () => {
  const ranges = [[1e-4, null, 1e-4], [3, 3.1], [1, 3], [0], [-2], []].map((values) =>
    lossAxis(values).range?.map((end) => Number(end.toPrecision(6))),
  )
  assert.deepEqual(ranges, [[0, 1.05e-4], [2.995, 3.105], [0, 3.15], [0, 1.05], [-2.1, 0], undefined])
})

test('labels of a linear axis are numbers as everywhere, however close its values are', () => {
  const labels = (values, zoom) => linearAxis(values, zoom).ticktext
  assert.deepEqual(labels([0, 2e6]), ['0', '1e6', '2e6'])
  assert.deepEqual(labels([-5e-7, 5e-7]), ['-5e-7', '0', '5e-7'])
  assert.deepEqual(labels([25.03849445268134, 25.038494452681345]), ['0', '10', '20'])
  assert.deepEqual(labels([0, 1], [0.2, 0.4]), ['0.2', '0.25', '0.3', '0.35', '0.4'])
  for (const most of [1, 2, 3, 4, 5, 6, 7, 8, 9]) assert.ok(labels([0, most]).length >= 3, String(most))
  assert.deepEqual(linearAxis([-1e308, 1e308]), {})
})

test('a log axis of few decades shows parts of them', () => {
  assert.deepEqual(logAxis([1, 30, null, -1, 0]).tickvals, [1, 2, 5, 10, 20])
  assert.deepEqual(logAxis([1e-6, 1e6]).tickvals.map(Math.log10).map(Math.round), [-6, -3, 0, 3, 6])
})

test('what a scale loses is counted without the zeros', () => {
  const sample = {
    step: 1,
    scale: 2 ** 10,
    lowest_exponent: -40,
    counts: [4, 0, 0, 0, 0, 0, 12],
    zeros: 100,
    nonfinite: 0,
  }
  assert.deepEqual(lostAt(sample, null), { underflow: 0.25, nearOverflow: 0 })
  assert.deepEqual(lostAt(sample, 16), { underflow: 0, nearOverflow: 0 })
  assert.deepEqual(lostAt(sample, 48), { underflow: 0, nearOverflow: 0.75 })
})

test('the best until then never gets worse, whichever way is up', () => {
  const trials = [3, 5, 1, 4].map((value, i) => ({ number: i + 1, value, state: 'complete', name: `t${i}`, run_id: i }))
  const best = (goal) => trialsFigure({ trials, metric: 'loss', goal }, {}).data[0].y
  assert.deepEqual(
    [best('minimize'), best('maximize')],
    [
      [3, 3, 1, 1],
      [3, 5, 5, 5],
    ],
  )
})

test('losses of evaluations are drawn with the loss, by the names of W&B and of Trainer', () => {
  const names = ['val/loss', 'eval_loss', 'test_loss', 'kl_loss', 'train_loss', 'eval_loss_ratio', 'accuracy']
  assert.deepEqual(lossesOf(names), ['eval_loss', 'test_loss', 'val/loss'])
})

test('a small panel has two labels at least', () => {
  assert.deepEqual(ticksOf([1, 80], 240, true), [20, 40, 60, 80])
  assert.deepEqual(ticksOf([1, 1000], 450, true), [200, 400, 600, 800, 1000])
  assert.deepEqual(ticksOf([3, 4], 100, true), [3, 4])
})
