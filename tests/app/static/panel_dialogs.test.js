import assert from 'node:assert/strict'
import { test } from 'node:test'
import { tableOf } from 'panel_dialogs'

test('lines share the rows of a table, and several points at an x have one each', () => {
  const lines = [
    { name: 'a', x: [2, 1, 1], y: [20, 10, 11] },
    { name: 'b', x: [3, 1], y: [null, 5] },
  ]
  assert.deepEqual(tableOf(lines), [
    [1, [10, 5]],
    [1, [11, null]],
    [2, [20, null]],
    [3, [null, null]],
  ])
})
