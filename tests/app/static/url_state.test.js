// What a browser would bring is node's own: events, and an address that history replaces.
import assert from 'node:assert/strict'
import { test } from 'node:test'

const target = new EventTarget()
let address = new URL('http://localhost/runs/1')
Object.defineProperty(globalThis, 'location', { get: () => address })
Object.assign(globalThis, {
  addEventListener: target.addEventListener.bind(target),
  history: {
    replaceState: (_state, _title, href) => {
      address = new URL(href)
    },
  },
})
const { readView, writeView } = await import('url_state')
const at = (query) => {
  address = new URL(`http://localhost/runs/1?${query}`)
  return readView()
}
const leave = () => target.dispatchEvent(new Event('pagehide'))

/** Default view of the browser's storage and of the URL. */
const usual = { logs: [], trimmed: [], search: '', hidden: [], pinned: [], collapsed: [] }

test('an address that says nothing shows all', () => {
  assert.deepEqual(at(''), { x: 'step', smooth: 0, range: null, rows: {}, ...usual })
})

test('what an address cannot mean is left aside', () => {
  assert.deepEqual(at('x=days&loss=cubic&smooth=7&range=1,2,3&y.loss=a,b'), {
    x: 'step',
    smooth: 0.99,
    range: null,
    rows: {},
    ...usual,
  })
  assert.deepEqual(
    [
      at('smooth=-1').smooth,
      at('smooth=x').smooth,
      at('range=5').range,
      at('range=1,Infinity').range,
      at('range=9,1').range,
    ],
    [0, 0, null, null, null],
  )
})

test('an address of an earlier version has the log axis of the loss in a parameter of its own', () => {
  assert.deepEqual(
    [at('loss=log').logs, at('loss=log&ylog=lr&ylog=loss').logs, at('loss=linear').logs],
    [['loss'], ['lr', 'loss'], []],
  )
  address = new URL('http://localhost/runs/1?loss=log')
  writeView(readView())
  leave()
  assert.equal(address.search, '?ylog=loss')
})

test('a page may have axes of its own, of which one is usual', () => {
  const choices = ['step', 'metric:epoch'].map((value) => ({ value, defaultChecked: value === 'metric:epoch' }))
  const section = { querySelectorAll: () => choices }
  const read = (query) => {
    at(query)
    return readView(section)
  }
  assert.deepEqual(
    [read('').x, read('x=step').x, read('x=metric:epoch').x, read('x=metric:other').x],
    ['metric:epoch', 'step', 'metric:epoch', 'metric:epoch'],
  )
  address = new URL('http://localhost/runs/1')
  writeView({ ...read(''), x: 'step' })
  leave()
  assert.equal(address.search, '?x=step')
  assert.equal(at('').x, 'step')
})

test('a view comes back as it was written, and what is usual is not written', () => {
  address = new URL('http://localhost/runs/1?other=1&y.gone=1,2')
  const view = {
    x: 'time',
    smooth: 0.5,
    range: [1, 2.5],
    rows: { 'val/loss': [-1, 1] },
    ...usual,
    logs: ['val/loss', 'lr'],
    trimmed: ['lr'],
  }
  writeView(view)
  leave()
  assert.equal(
    address.search,
    '?other=1&x=time&smooth=0.5&range=1,2.5&y.val%2Floss=-1,1&ylog=val%2Floss&ylog=lr&ytrim=lr',
  )
  assert.deepEqual(readView(), view)
  writeView({ x: 'step', smooth: 0, range: null, rows: {}, ...usual }, { draw: ['a', 'b'], hide: '' })
  leave()
  assert.equal(address.search, '?other=1&draw=a&draw=b')
})
