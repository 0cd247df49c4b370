// Height of the list's rows, kept in a cookie, so that the server sends it and nothing jumps.
import { root } from 'root'

const list = document.querySelector('[data-list]')
for (const choice of document.querySelectorAll('input[name=density]')) {
  choice.addEventListener('change', () => {
    if (list) list.dataset.density = choice.value
    document.cookie = `halfstep-density=${choice.value}; path=${root || '/'}; max-age=31536000; samesite=strict`
  })
}
