import assert from 'node:assert/strict'
import { test } from 'node:test'
import { objection } from 'upload'

test('a file that the server would refuse is not sent', () => {
  assert.equal(objection({ name: 'net.safetensors', size: 10 }, 10), '')
  assert.equal(objection({ name: 'net.pt', size: 2e9 }, 1e9), 'net.pt has 1.86 GiB; allowed: at most 954 MiB.')
  assert.match(objection({ name: 'net.zip', size: 10 }, 10), /allowed: \.safetensors or \.pt/)
  assert.equal(objection({ name: 'net.pt', size: 0 }, 10), 'net.pt is empty.')
})
