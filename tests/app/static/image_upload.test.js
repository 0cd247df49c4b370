// Images for Markdown: what is sent, and what stands in the text.
import assert from 'node:assert/strict'
import { test } from 'node:test'

globalThis.document = /** @type {any} */ ({ querySelectorAll: () => [], documentElement: { dataset: { root: '' } } })
const { markdownOf, rejection } = await import('image_upload')

test('only images of a size that the server takes are sent', () => {
  assert.equal(rejection({ name: 'a.png', type: 'image/png', size: 4 << 20 }), '')
  assert.match(rejection({ name: 'a.png', type: 'image/png', size: (4 << 20) + 1 }), /4 MiB; allowed: at most 4 MiB/)
  assert.match(
    rejection({ name: 'a.svg', type: 'image/svg+xml', size: 1 }),
    /image\/svg\+xml; allowed: PNG, JPEG, GIF or WebP/,
  )
  assert.match(rejection({ name: 'a', type: '', size: 1 }), /unknown type/)
})

test('a file name cannot end the text of its image', () => {
  assert.equal(markdownOf('my [plot](x).png', '/reports/1/images/2'), '![my plot(x)](/reports/1/images/2)')
})
