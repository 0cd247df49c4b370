import assert from 'node:assert/strict'
import { test } from 'node:test'
import { filteredRows, parseCsv, sortedRows } from 'data_table'
import { rebinned } from 'media_steps'

test('quoted cells hold commas, quotes and line breaks', () => {
  assert.deepEqual(parseCsv('a,b\r\n1,"x, ""y""\nz"\n,\n'), [
    ['a', 'b'],
    ['1', 'x, "y"\nz'],
    ['', ''],
  ])
  assert.deepEqual(parseCsv('a,b\n1,'), [
    ['a', 'b'],
    ['1', ''],
  ])
  assert.deepEqual(parseCsv(''), [])
})

test('a column sorts as numbers where all of it are, empty cells last', () => {
  const rows = [['10'], ['9'], [''], ['-1e2']]
  assert.deepEqual(sortedRows(rows, 0, 1), [['-1e2'], ['9'], ['10'], ['']])
  assert.deepEqual(sortedRows(rows, 0, -1), [['10'], ['9'], ['-1e2'], ['']])
  assert.deepEqual(sortedRows([['b'], ['10'], ['a']], 0, 1), [['10'], ['a'], ['b']])
})

test('rows match in any cell, whatever the case', () => {
  assert.deepEqual(
    filteredRows(
      [
        ['Cat', '1'],
        ['dog', '2'],
      ],
      ' cAT ',
    ),
    [['Cat', '1']],
  )
  assert.equal(filteredRows([['a'], ['b']], '').length, 2)
})

test('histograms of other ranges are spread over the same bins without loss', () => {
  const { low, counts } = rebinned([
    { lowest: -1, highest: 1, counts: [10, 20] },
    { lowest: 0, highest: 3, counts: [5, 0, 7] },
    { lowest: 2, highest: 2, counts: [4] },
  ])
  assert.equal(low, -1)
  const sums = counts.map((bins) => Math.round(bins.reduce((a, b) => a + b, 0) * 1e6) / 1e6)
  assert.deepEqual(sums, [30, 12, 4])
  assert.ok(counts[0].slice(33).every((value) => value === 0)) // nothing above 1, of -1 to 3 in 64 bins
})
