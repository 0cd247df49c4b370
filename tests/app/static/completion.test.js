import assert from 'node:assert/strict'
import { test } from 'node:test'
import { isUnfinished, proposals, wordAt } from 'completion'

const words = {
  keys: { status: 'how it stands', tag: 'a tag' },
  values: { status: ['running', 'failed', 'unreachable'], tag: ['has "quotes"', 'a b', 'plain'] },
  numbers: ['loss', 'step'],
  metrics: ['val/loss', 'odd name'],
  settings: ['training.lr', 'loss', 'a:b', 'learning_rate'],
}
const texts = (typed) => proposals(words, typed).map(({ text }) => text)

test('the word at the cursor ends at blanks that no quote holds', () => {
  const line = 'tag:"a b" lr>0.1 -sta'
  assert.deepEqual(
    [0, 6, 9, 10, 12, 21].map((cursor) => line.slice(...wordAt(line, cursor))),
    ['tag:"a b"', 'tag:"a b"', 'tag:"a b"', 'lr>0.1', 'lr>0.1', '-sta'],
  )
  assert.deepEqual(wordAt('a  b', 2), [2, 2])
  assert.deepEqual(wordAt('"open to', 8), [0, 8])
})

test('names come first by how they begin, then by what they hold, each once, with its first hint', () => {
  assert.deepEqual(texts('lo'), ['loss', 'val/loss'])
  assert.deepEqual(proposals(words, 'loss')[0], { text: 'loss', hint: 'number', isWhole: false })
  assert.deepEqual(texts('STA'), ['status:'])
  assert.deepEqual(texts('-sta'), ['-status:'])
})

test('a name is found by the initials of its words', () => {
  assert.deepEqual(texts('lr'), ['training.lr', 'learning_rate'])
})

test('a key is followed by what there is of it, quoted where a filter would misread it', () => {
  assert.deepEqual(texts('status:un'), ['status:unreachable', 'status:running'])
  assert.deepEqual(texts('tag:'), ['tag:"has ""quotes"""', 'tag:"a b"', 'tag:plain'])
  assert.deepEqual(texts('-tag:"a'), ['-tag:"a b"', '-tag:"has ""quotes"""', '-tag:plain'])
  assert.deepEqual(proposals(words, 'tag:pl'), [{ text: 'tag:plain', hint: '', isWhole: true }])
})

test('a name that is no key is quoted; of a number nothing is proposed', () => {
  assert.deepEqual(texts('odd'), ['"odd name"'])
  assert.deepEqual(texts('a:'), [])
  assert.deepEqual(texts('"a:'), ['"a:b"'])
  assert.deepEqual(texts('loss>0.'), [])
  assert.deepEqual(texts('nothing'), [])
})

test('of a thousand names some are shown', () => {
  const settings = Array.from({ length: 1000 }, (_, i) => `setting${i}`)
  assert.equal(proposals({ ...words, settings }, 'setting').length, 50)
})

test('a word that a filter would refuse is unfinished', () => {
  const some = ['status:', '-status:fai', 'tag:', 'status:failed', 'tag:pl', 'lo', 'loss>', 'a:']
  assert.deepEqual(
    some.filter((typed) => isUnfinished(words, typed)),
    ['status:', '-status:fai', 'tag:'],
  )
})
