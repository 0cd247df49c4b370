import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { test } from 'node:test'
import * as formats from 'formats'

/** Values and texts that the tests of Python's formats read, too. */
const CASES = JSON.parse(readFileSync(new URL('../../number_formats.json', import.meta.url), 'utf8'))

for (const [kind, rows] of Object.entries(CASES)) {
  test(`a ${kind} is formatted as on the server`, () => {
    for (const [value, text] of rows) {
      const html =
        kind === 'scale' ? text.replace(/\^(.*)/, (_, exponent) => `<sup>${exponent.replace('-', '−')}</sup>`) : text
      assert.equal(formats[kind](typeof value === 'string' ? Number(value) : value), html, `${kind} of ${value}`)
    }
  })
}
