import assert from 'node:assert/strict'
import { test } from 'node:test'
import { isFound } from 'find_setting'

test('all words must be there, in any order and case', () => {
  const text = 'training.max_grad_norm Largest norm Clips gradients.'
  assert.ok(isFound('clip GRAD', text))
  assert.ok(isFound('max_grad', text))
  assert.ok(!isFound('clip seed', text))
})
