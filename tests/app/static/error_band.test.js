import assert from 'node:assert/strict'
import { test } from 'node:test'
import { banded } from 'error_band'

test('lines are met between their points, and only where they are', () => {
  const found = banded(
    [
      { x: [0, 2, 4], y: [0, 2, 4] },
      { x: [1, 3], y: [3, 5] },
    ],
    'range',
  )
  assert.deepEqual(found, { x: [0, 1, 2, 3, 4], mean: [0, 2, 3, 4, 4], low: [0, 1, 2, 3, 4], high: [0, 3, 4, 5, 4] })
})

test('a deviation is that of a sample, and of one line none', () => {
  const { low, high } = banded(
    [
      { x: [1], y: [1] },
      { x: [1], y: [3] },
    ],
    'deviation',
  )
  assert.ok(Math.abs(high[0] - (2 + Math.SQRT2)) < 1e-12)
  assert.ok(Math.abs(low[0] - (2 - Math.SQRT2)) < 1e-12)
  assert.deepEqual(banded([{ x: [1], y: [7] }], 'deviation').high, [7])
})

test('a gap stays a gap', () => {
  const { x } = banded(
    [
      { x: [0, 1, 2], y: [5, null, 5] },
      { x: [0.5, 1], y: [null, null] },
    ],
    'range',
  )
  assert.deepEqual(x, [0, 2])
})

test('of many points there are places enough for a screen, from the first to the last', () => {
  const x = Array.from({ length: 5000 }, (_, i) => i)
  const { x: places, mean } = banded([{ x, y: x }], 'range')
  assert.equal(places.length, 400)
  assert.deepEqual([places[0], places.at(-1), mean.at(-1)], [0, 4999, 4999])
})
