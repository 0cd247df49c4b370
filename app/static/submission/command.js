// The form of a command: a row for each placeholder of its line, as the line is typed.

import { takeAlong } from 'carry_form'
import { root } from 'root'

const PLACEHOLDER = /\{\{[A-Za-z_]\w*\}\}|\{([A-Za-z_]\w*)\}/g
const MOST = 50

const form = document.querySelector('[data-command-form]')
const line = form.querySelector('[data-line]')
const rows = form.querySelector('[data-parameters]')
const blank = document.querySelector('[data-row]').innerHTML

/** Rows of placeholders that are gone, to be there again should they come back. */
const gone = new Map()

/** @param {string} text */
const placeholders = (text) =>
  [...new Set([...text.matchAll(PLACEHOLDER)].map((match) => match[1]).filter(Boolean))].slice(0, MOST)

/** @param {string} name A word, as the pattern says. @returns {Found} */
const made = (name) => {
  const template = document.createElement('template')
  template.innerHTML = blank.replaceAll('__name__', name).trim()
  return template.content.querySelector('*')
}

/** Shows of a row what its kind has: bounds, or choices. @param {HTMLElement} row */
const showKind = (row) => {
  const kind = row.querySelector('[data-kind]').value
  for (const part of row.querySelectorAll('[data-for]')) {
    part.hidden = !part.dataset.for.split(' ').includes(kind)
  }
}

const update = () => {
  const wanted = placeholders(line.value)
  for (const row of [...rows.children]) {
    if (wanted.includes(row.dataset.parameter)) continue
    gone.set(row.dataset.parameter, row)
    row.remove()
  }
  for (const [place, name] of wanted.entries()) {
    const there = rows.querySelector(`[data-parameter="${name}"]`)
    const row = there ?? gone.get(name) ?? made(name)
    if (rows.children[place] !== row) rows.insertBefore(row, rows.children[place] ?? null)
    showKind(row)
  }
}

for (const link of document.querySelectorAll('[data-to-sweep]')) takeAlong(form, link, `${root}/sweeps/new/command`)
line.addEventListener('input', update)
rows.addEventListener('change', (event) => showKind(event.target.closest('[data-parameter]')))
update()
