import assert from 'node:assert/strict'
import { test } from 'node:test'
import { patience, silence } from 'http'

test('a page that hears nothing says for how long, and of when its numbers are', () => {
  const receivedAt = new Date(2026, 10, 23, 14, 3, 20).getTime()
  assert.equal(silence(receivedAt, receivedAt + 9_999), 'reconnecting…')
  const said = 'the server has not answered for 40 s; numbers are of 14:03:20'
  assert.equal(silence(receivedAt, receivedAt + 40_000), said)
  assert.equal(silence(receivedAt, receivedAt + 49_999), said)
  assert.match(silence(receivedAt, receivedAt + 200_000), / for 3 min 20 s; /)
})

test('each try waits twice as long, to half a minute, and no two pages alike', () => {
  const { next, reset } = patience()
  for (const longest of [1000, 2000, 4000, 8000, 16000, 30000, 30000]) {
    const wait = next()
    assert.ok(wait >= longest / 2 && wait <= longest, `${wait} of ${longest}`)
  }
  reset()
  assert.ok(next() <= 1000)
  const waits = new Set(Array.from({ length: 20 }, () => patience().next()))
  assert.ok(waits.size > 1)
})
