import assert from 'node:assert/strict'
import { test } from 'node:test'
import { filesAt, lastUntil, stepsOf } from 'media_steps'

const FILES = [
  { name: 'rows.cell-1-2.png', step: 10 },
  { name: 'rows.csv', step: 10 },
  { name: 'shot-10.png', step: 20 },
  { name: 'shot-2.png', step: 20 },
]

test('a key has one stop for each step, and the last one up to a step', () => {
  const steps = stepsOf(FILES)
  assert.deepEqual(steps, [10, 20])
  assert.deepEqual(
    [9, 10, 19, 20, 99].map((step) => lastUntil(steps, step)),
    [-1, 0, 0, 1, 1],
  )
})

test('files of a step are in the order of their numbers, a table before the pictures of its cells', () => {
  const names = (step) => filesAt(FILES, step).map(({ name }) => name)
  assert.deepEqual(names(10), ['rows.csv', 'rows.cell-1-2.png'])
  assert.deepEqual(names(20), ['shot-2.png', 'shot-10.png'])
})
