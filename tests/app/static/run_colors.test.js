import assert from 'node:assert/strict'
import { test } from 'node:test'
import { placesOf } from 'run_colors'

test('a run has the colour of its id, an older one first, and ten more are dashed', () => {
  assert.deepEqual(
    [...placesOf(['21', '3', '11'])],
    [
      ['3', 3],
      ['11', 1],
      ['21', 2],
    ],
  )
  const many = placesOf(Array.from({ length: 25 }, (_, i) => String(i * 10)))
  assert.deepEqual([many.get('0'), many.get('90'), many.get('100'), many.get('240')], [0, 9, 10, 24])
})
