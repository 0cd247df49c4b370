import assert from 'node:assert/strict'
import { test } from 'node:test'
import { question } from 'estimate'

/** @param {Record<string, string>} typed */
const asked = (typed) => {
  const data = new FormData()
  for (const [name, value] of Object.entries(typed)) data.set(name, value)
  return question(data)
}

test('what the form holds is what is asked about', () => {
  const typed = {
    recipe: 'gpt',
    precision: 'fp16',
    nodes: '2',
    'training.steps': '400',
    'training.batch_size': '8',
    'checkpoints.every_steps': '100',
  }
  assert.equal(asked(typed), 'recipe=gpt&precision=fp16&batch_size=8&nodes=2&steps=400&every_steps=100')
  assert.equal(
    asked({ ...typed, 'checkpoints.keep_last': '2', parent_step: '150' }),
    'recipe=gpt&precision=fp16&batch_size=8&nodes=2&steps=250',
  )
  assert.equal(
    asked({ recipe: 'gpt', 'recipe.width': '128', 'recipe.text': 'x'.repeat(300), 'training.epochs': '1' }),
    'recipe=gpt&size=recipe.width%3D128',
  )
  assert.equal(
    asked({ ...typed, 'checkpoints.every_steps': '', 'training.epochs': '3' }),
    'recipe=gpt&precision=fp16&batch_size=8&nodes=2',
  )
})
