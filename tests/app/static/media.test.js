import assert from 'node:assert/strict'
import { test } from 'node:test'
import { asOf } from 'media_steps'

test('of each name the last is shown that had come by then', () => {
  const all = [
    { name: 'a.png', step: 10, figure: null },
    { name: 'b.txt', step: 10, figure: null },
    { name: 'a.png', step: 20, figure: null },
  ]
  const shown = (step) => [...asOf(all, step).values()].map((each) => `${each.name} ${each.step}`)
  assert.deepEqual(shown(9), [])
  assert.deepEqual(shown(19), ['a.png 10', 'b.txt 10'])
  assert.deepEqual(shown(20), ['a.png 20', 'b.txt 10'])
})
