import assert from 'node:assert/strict'
import test from 'node:test'

import { commandOf, quoted, valueOf } from 'submit_command'

test('words are quoted where a shell would change them', () => {
  assert.equal(quoted('training.steps=400'), 'training.steps=400')
  assert.equal(quoted('a b'), "'a b'")
  assert.equal(quoted("it's"), "'it'\\''s'")
  assert.equal(quoted(''), "''")
})

test('a value is what the command reads', () => {
  assert.equal(valueOf('number', '1e-3'), '1e-3')
  assert.equal(valueOf('number', ''), 'null')
  assert.equal(valueOf('checkbox', 'true'), 'true')
  assert.equal(valueOf('list', 'head, body'), '["head","body"]')
  assert.equal(valueOf('text', 'cosine'), 'cosine')
  assert.equal(valueOf('text', '12'), '"12"')
})

test('only what differs from the defaults is in the command', () => {
  const setting = (path, text, isChanged) => ({ path, kind: 'number', text, isChanged })
  const settings = [setting('training.steps', '500', true), setting('training.seed', '0', false)]
  assert.equal(
    commandOf('digits', settings, [['--precision', 'bf16'], ['--name', ''], ['--preemptible'], ['']]),
    'halfstep run submit digits \\\n  --precision bf16 \\\n  --preemptible \\\n  --set training.steps=500',
  )
})
