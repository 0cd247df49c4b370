import assert from 'node:assert/strict'
import { test } from 'node:test'
import { folded, merged, withPauses } from 'decimation'

const steps = Array.from({ length: 100_000 }, (_, i) => i + 1)
const screen = { range: [1, 100_000], pixels: 500 }

test('a long line has no more points than a screen shows, and keeps its extremes and its end', () => {
  const y = steps.map((step) => (step === 77_777 ? 99 : step === 3 ? -99 : Math.sin(step)))
  const line = folded({ x: steps, y }, screen)
  assert.ok(line.x.length <= 3 * 500, String(line.x.length))
  assert.deepEqual([Math.min(...line.y), Math.max(...line.y)], [-99, 99])
  assert.equal(line.x[line.y.indexOf(99)], 77_777)
  assert.equal(line.x.at(-1), 100_000)
  assert.deepEqual(
    line.x,
    line.x.toSorted((a, b) => a - b),
  )
})

test('points of a line that grows do not move', () => {
  const y = steps.map((step) => Math.sin(step))
  const of = (length) => folded({ x: steps.slice(0, length), y: y.slice(0, length) }, screen).x.slice(0, 300)
  assert.deepEqual(of(90_000), of(99_000))
})

test('a line that fits is as it is, in arrays of its own; a column of gaps is a gap', () => {
  const line = { x: [1, 2, 3], y: [1, null, 3] }
  const drawn = folded(line, { range: [1, 3], pixels: 100 })
  assert.deepEqual(drawn, line)
  assert.notEqual(drawn.x, line.x)
  assert.ok(folded({ x: steps, y: steps.map(() => null) }, screen).y.every((value) => value === null))
})

test('a line breaks where nothing was sampled for long', () => {
  assert.deepEqual(withPauses([0, 10, 20, 1000, 1010]), {
    times: [0, 10, 20, 510, 1000, 1010],
    places: [0, 1, 2, -1, 3, 4],
  })
  for (const times of [[], [5], [0, 10, 20, 60]]) assert.deepEqual(withPauses(times).times, times)
})

test('ticks within a pixel are one, and none is lost', () => {
  const skips = {
    steps: steps.filter((step) => step % 7 === 0),
    counts: steps.filter((step) => step % 7 === 0).map(() => 1),
  }
  const ticks = merged(skips, skips.steps, screen)
  assert.ok(ticks.length <= 500)
  assert.equal(
    ticks.reduce((sum, { count }) => sum + count, 0),
    skips.steps.length,
  )
  const values = skips.steps.map((_, i) => (i % 2 ? 'NaN' : 'Infinity'))
  const twice = merged({ ...skips, values }, skips.steps, screen)
  assert.ok(twice.length > 900 && twice.length <= 1000)
  assert.equal(
    twice.filter(({ value }) => value === 'NaN').reduce((sum, { count }) => sum + count, 0),
    skips.steps.length >> 1,
  )
  assert.deepEqual(
    merged(skips, skips.steps, { range: [7, 21], pixels: 500 }).map(({ first, count }) => [first, count]),
    [
      [7, 1],
      [14, 1],
      [21, 1],
    ],
  )
})
