import assert from 'node:assert/strict'
import { test } from 'node:test'
import { count, scale, size } from 'formats'

test('numbers are as formats.py says them', () => {
  assert.equal(count(1234567), '1,234,567')
  const scales = [[2 ** 19, '2<sup>19</sup>'], [2 ** -10, '2<sup>−10</sup>'], [1, '1'], [8, '8'], [3000, '3000'], [0, '0']]
  for (const [value, text] of scales) assert.equal(scale(value), text)
})

test('a size is in the unit that fits, and never in a power of ten', () => {
  // tests/app/html/test_formats.py has the same cases.
  const sizes = [[0, '0 B'], [999, '999 B'], [1000, '1 kB'], [999_999, '1000 kB'], [10 ** 6, '1 MB'], [2_512_345_678, '2.51 GB'], [10 ** 15, '1,000 TB'], [123 * 10 ** 15, '123,000 TB']]
  for (const [bytes, text] of sizes) assert.equal(size(bytes), text)
})
